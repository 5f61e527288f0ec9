"""Settings of `mooncake-store serve`: flags > environment MOONCAKE_STORE_* > file > these defaults."""

from pathlib import Path
from typing import Annotated

import msgspec

from kvcore.errors import ConfigError
from kvcore.units import format_size
from kvcore.wire.codec import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_PAYLOAD_BYTES
from store_server.core.eviction import POLICIES
from store_server.core.store import StoreLimits
from store_server.events_config import EventsConfig
from store_server.levels import StorageLevel, cpu_capacity_bytes, cpu_path, remote_config, ssd_config
from store_server.peers_config import PeersConfig
from store_server.remote import RemoteConfig
from store_server.ssd import SsdConfig
from store_server.tenants import Tenant
from store_server.tenants import check as check_tenants

ENV_PREFIX = "MOONCAKE_STORE"
DEFAULT_POOL_SIZE_BYTES = 1 << 30
KNOWN_PLANES = ("rdma", "shm", "tcp")  # best first


def _help(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


def _port(text: str, lowest: int = 0) -> msgspec.Meta:
    # The system would take a larger one modulo 65536.
    return msgspec.Meta(description=text, ge=lowest, le=65535)


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _port("TCP port, 0: any free one")] = 50051
    unix_path: Annotated[str, _help("Unix socket for the same protocol, '': in a private directory")] = ""
    admin_host: Annotated[str, _help("address of /health, /ready, /metrics and /stats")] = "127.0.0.1"
    admin_port: Annotated[int, _port("HTTP port of the same, 0: any free one, -1: none", -1)] = 50052
    tls_cert: Annotated[str, _help("file of the certificate, '': TCP without TLS")] = ""
    tls_key: Annotated[str, _help("file of its private key, '': in the same file")] = ""
    tls_client_ca: Annotated[str, _help("clients must show a certificate signed by one of these")] = ""
    token: Annotated[str, _help("clients must send it, '': everybody is let in")] = ""
    tenants: Annotated[
        list[Tenant], _help('as a flag JSON: [{"name": "a", "token": "secret", "dram_quota": "64gb"}]')
    ] = []
    planes: Annotated[tuple[str, ...], _help("how bytes may move, of rdma, shm and tcp")] = KNOWN_PLANES
    device_name: Annotated[str, _help("RDMA devices, comma-separated, '': all that are up")] = ""

    pool_size_bytes: Annotated[int, _help("DRAM for KV blocks, taken at start, for example 64gb")] = (
        DEFAULT_POOL_SIZE_BYTES
    )
    storage_levels: Annotated[
        list[StorageLevel],
        _help('as a flag JSON: [{"level": "ssd", "paths": ["/mnt/nvme0/kv"], "capacity": "1tb"}]'),
    ] = []
    slab_bytes: Annotated[int, _help("unit of allocation, a power of two, 0: chosen by the pool's size")] = 0
    huge_pages: Annotated[bool, _help("take the pool from reserved huge pages (vm.nr_hugepages)")] = False
    eviction_policy: Annotated[str, _help(", ".join(sorted(POLICIES)))] = "lru"
    high_watermark: Annotated[float, _help("share of the pool above which eviction begins")] = 0.95
    low_watermark: Annotated[float, _help("share of the pool at which it ends")] = 0.90

    reservation_timeout_ms: Annotated[
        int, _help("a writer that commits nothing for so long loses its block")
    ] = 30_000
    default_lease_ms: Annotated[int, _help("lease of a reader that asks for none in particular")] = 10_000
    max_lease_ms: Annotated[int, _help("longest lease")] = 600_000
    hello_timeout_ms: Annotated[int, _help("a client that does not say who it is for so long is cut off")] = (
        10_000
    )
    send_timeout_ms: Annotated[int, _help("a reader that takes no byte for so long is disconnected")] = 60_000
    room_timeout_ms: Annotated[int, _help("a writer waits so long for room that write-back to SSD makes")] = (
        4_000
    )
    promotion_timeout_ms: Annotated[int, _help("a reader without wait_ms waits so long for the SSD")] = 4_000
    save_timeout_ms: Annotated[int, _help("at the end, blocks go from DRAM to the SSD for so long")] = 30_000
    verify_on_write: Annotated[bool, _help("check the checksums of what arrives over tcp")] = False

    spin_us: Annotated[int, _help("the next request is looked for so long before the store sleeps")] = 50
    max_connections: Annotated[int, _help("clients at once")] = 4096
    max_keys: Annotated[int, _help("keys in one message")] = 16_384
    max_waiting_keys: Annotated[int, _help("keys that requests of one client wait for at once")] = 65_536
    max_body_bytes: Annotated[int, _help("size of one message without payload")] = DEFAULT_MAX_BODY_BYTES
    max_payload_bytes: Annotated[int, _help("payload of one message")] = DEFAULT_MAX_PAYLOAD_BYTES
    max_unsent_bytes: Annotated[int, _help("unsent answers of a client before its requests have to wait")] = (
        64 << 20
    )

    peers: PeersConfig = PeersConfig()
    events: EventsConfig = EventsConfig()

    log_level: Annotated[str, _help("debug, info, warning or error")] = "info"
    log_json: Annotated[bool, _help("log lines as JSON")] = False

    def check(self) -> None:
        """ConfigError for what the types alone cannot rule out."""
        if self.eviction_policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ConfigError(f"eviction_policy {self.eviction_policy!r} is not one of {known}")
        if unknown := sorted(set(self.planes) - set(KNOWN_PLANES)):
            raise ConfigError(f"planes: {', '.join(unknown)} not known, only {', '.join(KNOWN_PLANES)}")
        if "tcp" not in self.planes:
            raise ConfigError("planes: tcp must be among them, it is how clients reach the store at all")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                f"watermarks must be 0 < low_watermark <= high_watermark <= 1, not {self.low_watermark} and "
                f"{self.high_watermark}"
            )
        if self.pool_size_bytes < 1 << 20:
            raise ConfigError(
                f"pool_size_bytes must be at least 1 MiB, not {format_size(self.pool_size_bytes)}"
            )
        if self.slab_bytes and (
            self.slab_bytes & (self.slab_bytes - 1) or not 4096 <= self.slab_bytes <= self.pool_size_bytes
        ):
            raise ConfigError("slab_bytes must be 0 or a power of two from 4 KiB to the size of the pool")
        for name in (
            "reservation_timeout_ms",
            "default_lease_ms",
            "max_lease_ms",
            "hello_timeout_ms",
            "send_timeout_ms",
            "room_timeout_ms",
            "promotion_timeout_ms",
            "save_timeout_ms",
            "max_connections",
            "max_keys",
            "max_waiting_keys",
            "max_body_bytes",
            "max_payload_bytes",
            "max_unsent_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.spin_us < 0:
            raise ConfigError(f"spin_us must not be negative (0: sleep at once), it is {self.spin_us}")
        self.peers.check()
        self.events.check()
        check_tenants(self.tenants, self.token)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level {self.log_level!r} is not one of debug, info, warning, error")

    def dram_bytes(self) -> int:
        """The size of the pool: that of the cpu level if there is one, else `pool_size_bytes`."""
        level_bytes = cpu_capacity_bytes(self.storage_levels)
        if level_bytes is None:
            return self.pool_size_bytes
        if self.pool_size_bytes not in (DEFAULT_POOL_SIZE_BYTES, level_bytes):
            raise ConfigError(
                "pool_size_bytes and the cpu level of storage_levels say different sizes; give one"
            )
        return level_bytes

    def dram_path(self) -> Path | None:
        """What the pool is mapped from; None for ordinary memory. ConfigError for what makes no sense."""
        path = cpu_path(self.storage_levels)
        if path is not None and self.huge_pages:
            raise ConfigError("huge_pages is for ordinary memory; the cpu level of storage_levels has a path")
        return path

    def ssd(self) -> SsdConfig | None:
        return ssd_config(self.storage_levels)

    def remote(self) -> RemoteConfig | None:
        return remote_config(self.storage_levels)

    def limits(self) -> StoreLimits:
        return StoreLimits(
            pool_size_bytes=self.dram_bytes(),
            slab_bytes=self.slab_bytes or None,
            eviction_policy=self.eviction_policy,
            high_watermark=self.high_watermark,
            low_watermark=self.low_watermark,
            reservation_timeout_ms=self.reservation_timeout_ms,
            default_lease_ms=self.default_lease_ms,
            max_lease_ms=self.max_lease_ms,
            max_payload_bytes=self.max_payload_bytes,
            max_waiting_keys=self.max_waiting_keys,
            room_timeout_ms=self.room_timeout_ms,
            promotion_timeout_ms=self.promotion_timeout_ms,
        )
