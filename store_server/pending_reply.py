"""The answer to one request whose keys are decided one by one."""

import asyncio
from collections.abc import Callable

from kvcore.wire.messages import Reply, Status, StatusReply


class PendingReply:
    """`answer` is called once: when the last open key is closed, or earlier by whoever calls `finish`."""

    def __init__(self, request_id: int, num_keys: int, answer: Callable[[Reply], None]) -> None:
        self.request_id = request_id
        self.statuses = bytearray(num_keys)
        self.num_open = 0
        self.timer: asyncio.TimerHandle | None = None
        self._answer = answer

    def close(self, index: int, status: Status) -> None:
        self.statuses[index] = status
        self.num_open -= 1
        if not self.num_open:
            self.finish()

    def finish(self) -> None:
        """Answers; what is open keeps the status it has."""
        if self.timer is not None:
            self.timer.cancel()
        self._answer(self.reply())

    def reply(self) -> StatusReply:
        return StatusReply(self.request_id, bytes(self.statuses))
