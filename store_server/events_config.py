"""The `[events]` table: whether and where the store publishes what it holds."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from kvcore.wire.events import HashForm


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`endpoint` "" publishes nothing. Port `*` takes any free one."""

    endpoint: Annotated[str, Meta(description="publish KV events here, such as tcp://127.0.0.1:5557")] = ""
    replay_endpoint: Annotated[str, Meta(description="routers ask here for what they missed")] = ""
    topic: Annotated[str, Meta(description="topic of the messages")] = ""
    buffer_steps: Annotated[int, Meta(description="messages kept for replay")] = 10_000
    hash_forms: Annotated[
        tuple[HashForm, ...],
        Meta(description="whose names blocks get in events: vllm, sglang or both"),
    ] = (HashForm.VLLM,)

    def check(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value and not value.startswith(("tcp://", "ipc://")):
                raise ConfigError(f'events.{name}: write "tcp://127.0.0.1:5557" or "ipc:///path"')
        if self.replay_endpoint and not self.endpoint:
            raise ConfigError("events.replay_endpoint without events.endpoint: there is nothing to replay")
        if self.buffer_steps < 1:
            raise ConfigError(f"events.buffer_steps must be at least 1, not {self.buffer_steps}")
        if not self.hash_forms:
            raise ConfigError("events.hash_forms: name at least one of vllm, sglang")
