"""The `[peers]` table: other stores that objects are copied from."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.client.address import parse_address
from kvcore.errors import ConfigError


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: Annotated[
        tuple[str, ...],
        Meta(description="stores that clients may have copied from; '': the operator any, tenants none"),
    ] = ()
    tls_ca: Annotated[
        str, Meta(description="for tls:// sources: certificates to trust, '': the system's")
    ] = ""
    tls_cert: Annotated[str, Meta(description="our certificate, for sources that ask for one")] = ""
    tls_key: Annotated[str, Meta(description="file of its private key")] = ""
    max_copying: Annotated[int, Meta(description="requests that are copied for at once, others wait")] = 4
    answer_timeout_ms: Annotated[int, Meta(description="a source that is silent for so long is given up")] = (
        5_000
    )
    timeout_ms: Annotated[int, Meta(description="what has not been copied after so long is given up")] = (
        30_000
    )

    def check(self) -> None:
        """ConfigError for what cannot work."""
        for source in self.sources:
            parse_address(source)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("peers: give tls_cert and tls_key, or neither")
        for name in ("max_copying", "answer_timeout_ms", "timeout_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"peers.{name} must be at least 1, not {getattr(self, name)}")
