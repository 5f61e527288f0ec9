"""Settings of the remote level."""

from urllib.parse import urlsplit

import msgspec

from kvcore.errors import ConfigError

REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
OBJECT_STORE_SCHEMES = ("file", "s3", "gs", "az")


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` says what it is and where; `options` go to its client as they are (endpoint, region, password).

    `capacity_bytes`: what we delete the oldest for, 0: no limit of ours. `timeout_ms`: of one request.
    `refresh_ms`: how long after one listing the next begins, which finds what other stores have written.
    `num_requests`: reads at once, and as many writes.
    """

    url: str
    options: dict[str, str] = {}
    capacity_bytes: int = 0
    timeout_ms: float = 4_000
    refresh_ms: float = 60_000
    num_requests: int = 16

    def check(self) -> None:
        """ConfigError for what cannot work."""
        if self.scheme not in (*REDIS_SCHEMES, *OBJECT_STORE_SCHEMES):
            raise ConfigError(
                f"storage_levels: the remote url {self.public_url!r} must begin with one of "
                f"{', '.join(f'{scheme}://' for scheme in (*OBJECT_STORE_SCHEMES, *REDIS_SCHEMES))}"
            )
        if self.timeout_ms <= 0 or self.refresh_ms <= 0:
            raise ConfigError("storage_levels: timeout and refresh of the remote level must be more than 0")

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def public_url(self) -> str:
        """For logs: without user and password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
