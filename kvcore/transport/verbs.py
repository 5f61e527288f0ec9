"""What we need of RDMA verbs, whichever binding carries it: pyverbs (rdma-core's own; Debian python3-pyverbs)
or the `ibverbs` wheel. `kvcore.transport.verbs_fake` is a third one, for tests without a device.

Nothing here blocks with Python's lock held: completions are waited for with `select` on a descriptor. Objects
are not thread-safe unless they say so; each must be closed, queue pairs before their completion queue, all of
them before their device.
"""

import enum
import select
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import msgspec

from kvcore.errors import ConfigError, StoreUnavailable
from kvcore.transport import verbs_sysfs
from kvcore.wire.direct import QueuePairAddress as QueuePairAddress

# Soft-RoCE takes 7 for "try for ever": a dead peer would never be noticed.
MAX_RETRIES = 6


class RdmaUnavailable(StoreUnavailable):
    """No library, no device, or a device that refuses; says which. Other planes go on."""


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout_exponent`: an unanswered packet is sent again after 4.096 us * 2**n, `retries` times. With the
    defaults a dead peer is known after about half a second. `traffic_class`: of RoCE packets (DSCP << 2)."""

    timeout_exponent: int = 14
    retries: int = MAX_RETRIES
    traffic_class: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.retries <= MAX_RETRIES:
            raise ValueError(f"retries must be 0 to {MAX_RETRIES}, not {self.retries}: 7 may mean for ever")
        if not 1 <= self.timeout_exponent <= 31:
            raise ValueError(
                f"timeout_exponent must be 1 to 31, not {self.timeout_exponent}: 0 means for ever"
            )


class Opcode(enum.IntEnum):
    """Values are those of ibv_wr_opcode."""

    WRITE = 0
    WRITE_WITH_IMMEDIATE = 1
    READ = 4


class Operation(NamedTuple):
    """One contiguous piece: `size_bytes` between memory here and at the peer."""

    local_address: int
    size_bytes: int
    local_key: int
    remote_address: int


class Completion(NamedTuple):
    """`status` 0 is success, else one of STATUS_NAMES. `immediate` only of a received
    WRITE_WITH_IMMEDIATE."""

    request_id: int
    status: int
    immediate: int | None = None


STATUS_NAMES = {
    0: "success",
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error",
    5: "flushed after an error before it",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "invalid request at the peer",
    10: "access refused by the peer (bad rkey or address)",
    11: "remote operation error",
    12: "the peer does not answer",
    13: "the peer is not ready to receive",
    19: "fatal error of the device",
    20: "response timeout",
    21: "general error",
}


def status_name(status: int) -> str:
    return STATUS_NAMES.get(status, f"status {status}")


class Region(Protocol):
    """Registered memory. Thread-safe to read; close it when no request refers to it any more."""

    address: int
    size_bytes: int
    local_key: int
    remote_key: int

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    """`fd` becomes readable after `arm` when there is a completion that came later."""

    fd: int

    def poll(self, max_completions: int = 64) -> list[Completion]:
        """What has completed; never waits. RdmaUnavailable when the queue is broken."""
        ...

    def arm(self) -> None:
        """Asks for one event. Poll once more afterwards: what came before it makes no event."""
        ...

    def take_event(self) -> None:
        """Consumes the event that made `fd` readable; nothing happens if there is none."""
        ...

    def close(self) -> None: ...


class Chain(Protocol):
    """Work requests built once and used again: only what differs is written anew. One chain may be posted
    again when its completion has been seen."""

    capacity: int

    def fill(
        self,
        opcode: Opcode,
        remote_key: int,
        operations: Sequence[Operation],
        request_id: int,
        *,
        immediate: int = 0,
    ) -> None:
        """1 to `capacity` operations. Each bears `request_id`, the last one alone is signalled and, for
        WRITE_WITH_IMMEDIATE, alone carries it; the others are plain WRITEs. Writes of up to the queue pair's
        `max_inline_bytes` are inlined: their memory may be reused after `post` and needs no key."""
        ...

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection. After its first error every request on it fails: close it and make a new one."""

    number: int
    max_requests: int
    max_inline_bytes: int

    @property
    def address(self) -> QueuePairAddress: ...

    def chain(self, capacity: int) -> Chain:
        """Capacity at most `max_requests`."""
        ...

    def connect(self, peer: QueuePairAddress, options: PathOptions) -> None:
        """From fresh to ready to send. RdmaUnavailable when the device refuses."""
        ...

    def post(self, chain: Chain) -> None:
        """What `fill` put there last. RdmaUnavailable when nothing, or not all, has been taken."""
        ...

    def post_receives(self, region: Region, count: int, request_id: int) -> None:
        """Room for `count` immediates of the peer. `region` takes no bytes; verbs want some memory named."""
        ...

    def close(self) -> None:
        """Destroys it: when this returns, the device touches no memory for it any more, on either account:
        own requests have ended, requests of the peer are refused. May be called more than once."""
        ...


class Device(Protocol):
    """An open device with one protection domain, on its first port. All methods may be called from any
    thread."""

    name: str
    max_message_bytes: int

    def register(self, address: int, size_bytes: int, *, remote: bool) -> Region:
        """Pins memory. `remote`: the peer may read and write it. RdmaUnavailable with a hint when refused."""
        ...

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool) -> Region:
        """Memory of a device (GPU) exported as dma-buf. The region's own `address` is the one to use in
        operations: bindings differ in whether that is an offset."""
        ...

    def completion_queue(self, capacity: int) -> CompletionQueue: ...

    def queue_pair(
        self,
        completions: CompletionQueue,
        *,
        max_requests: int,
        max_receives: int = 1,
        remote_access: bool = False,
    ) -> QueuePair:
        """`remote_access`: the peer may read and write what is registered with `remote`."""
        ...

    def close(self) -> None: ...


class Binding(Protocol):
    name: str

    def device_names(self) -> list[str]: ...

    def is_active(self, device_name: str) -> bool:
        """Whether its port is up."""
        ...

    def open(self, device_name: str) -> Device: ...


def wait_for_event(completions: CompletionQueue, timeout_s: float) -> bool:
    """Sleeps, without Python's lock, until an armed queue has an event or the time is over."""
    poller = select.poll()
    poller.register(completions.fd, select.POLLIN)
    if not poller.poll(max(0.0, timeout_s) * 1000):
        return False
    completions.take_event()
    return True


# ibverbs first: it lets other threads run in every call, pyverbs in none.
BINDINGS: dict[str, tuple[str, str]] = {
    "ibverbs": ("ibverbs", "kvcore.transport.verbs_ibverbs"),
    "pyverbs": ("pyverbs", "kvcore.transport.verbs_pyverbs"),
}


def choose_devices(binding: Binding, wanted: str) -> list[str]:
    """Devices of a comma-separated list, in its order; of "" all whose port is up. ConfigError: not there;
    RdmaUnavailable: none is up."""
    present = binding.device_names()
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in present:
            known = ", ".join(present) or "none"
            raise ConfigError(f"RDMA device {name!r} is not on this host: there is {known}")
    found = names or [name for name in present if binding.is_active(name)]
    if not found:
        raise RdmaUnavailable(f"none of the RDMA devices has an active port: {', '.join(present)}")
    return found


def load_binding(wanted: str = "", is_installed: Callable[[str], object] = find_spec) -> Binding:
    """The first binding that can be imported, or the one named `wanted`.

    RdmaUnavailable: this machine has no device, or none of the bindings works; the text says what to do.
    Looks at sysfs first, so that machines without a device never load a library.
    """
    if wanted and wanted not in BINDINGS:
        raise RdmaUnavailable(f"unknown verbs binding {wanted!r}: choose from {', '.join(BINDINGS)}")
    if not verbs_sysfs.device_names():
        raise RdmaUnavailable("no RDMA device on this host (/sys/class/infiniband is empty)")
    reasons = []
    for name in [wanted] if wanted else BINDINGS:
        package, module = BINDINGS[name]
        if is_installed(package) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            binding: Binding = import_module(module).BINDING
            binding.device_names()
        except (ImportError, RdmaUnavailable) as error:
            reasons.append(f"{name} does not work: {error}")
            continue
        return binding
    raise RdmaUnavailable(
        f"there is an RDMA device, but {'; '.join(reasons)}. Install the `rdma` extra (the ibverbs wheel) or "
        "python3-pyverbs, and libibverbs1 with ibverbs-providers"
    )
