"""Writers that wait for room: their requests are tried again, first come first served, as bytes come free.

Only with a cold tier is there anything to wait for: without one, room is made at once or not at all.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from store_server.core.deadlines import NEVER, Agenda
from store_server.core.objects import Session

Attempt = Callable[[bool], bool]
"""Carries the request out, or says False when there is still no room; with True it must not wait any
longer."""


class _Parked(msgspec.Struct):
    session: Session
    attempt: Attempt
    deadline: float


class RoomQueue:
    def __init__(self, agenda: Agenda, timeout_s: float) -> None:
        self._agenda = agenda
        self._timeout_s = timeout_s
        self._parked: deque[_Parked] = deque()

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, session: Session, attempt: Attempt, now: float) -> None:
        deadline = now + self._timeout_s
        self._parked.append(_Parked(session, attempt, deadline))
        self._agenda.expect(deadline)

    def retry(self) -> None:
        """There may be room now. Ends at the first that still finds none: small requests do not overtake."""
        while self._parked and self._parked[0].attempt(False):
            self._parked.popleft()

    def expire(self, now: float) -> None:
        while self._parked and self._parked[0].deadline <= now:
            self._parked.popleft().attempt(True)

    def next_deadline(self) -> float:
        return self._parked[0].deadline if self._parked else NEVER

    def close_session(self, session: Session) -> None:
        self._parked = deque(parked for parked in self._parked if parked.session is not session)
