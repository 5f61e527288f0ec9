"""What a client keeps of RDMA for as long as it lives: open devices and registered memory. Queue pairs come
and go with connections to the store; registrations, which cost a second for each few GB, do not."""

import ctypes
import logging
import os
import threading
from typing import Protocol

from kvcore.layout import as_views
from kvcore.transport.base import Buffer
from kvcore.transport.parts import UnpinnedRegion
from kvcore.transport.rdma_memory import BounceBuffer, MemoryMap, Registered, address_of
from kvcore.transport.verbs import Binding, Device, RdmaUnavailable, Region, choose_devices, load_binding

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20
PROBE_BYTES = 8


class User(Protocol):
    """What has a queue pair on one of the devices."""

    def close(self) -> None: ...

    def join(self) -> None:
        """Waits until it has let go of everything."""
        ...


class HostRegion:
    """Implements Region over all devices. Holds on to the memory until it is closed."""

    def __init__(self, host: "RdmaHost", view: memoryview, regions: list[Region | None]) -> None:
        self.size_bytes = len(view)
        self._view: memoryview | None = view
        self._host = host
        self.regions = regions
        keys = [region.local_key if region is not None else None for region in regions]
        self.entry = Registered(address_of(view), len(view), keys)

    def close(self) -> None:
        view, self._view = self._view, None
        if view is not None and self._host.pid == os.getpid():
            self._host.forget(self)
            for region in self.regions:
                if region is not None:
                    region.close()
            view.release()


class RdmaHost:
    """Thread-safe. `devices[i]` uses the i-th key of whatever `memory` finds."""

    def __init__(self, binding: Binding, device_names: str = "") -> None:
        """RdmaUnavailable when no device can be opened. ConfigError: no device of that name."""
        self.binding = binding
        self.pid = os.getpid()
        self.devices: list[Device] = []
        self.memory = MemoryMap()
        self._lock = threading.Lock()
        self._regions: list[HostRegion] = []
        self._bounce: BounceBuffer | None = None
        self._users: set[User] = set()
        reasons = []
        for name in choose_devices(binding, device_names):
            try:
                self.devices.append(binding.open(name))
            except RdmaUnavailable as error:
                reasons.append(str(error))
        if not self.devices:
            raise RdmaUnavailable("; ".join(reasons))

    @classmethod
    def open(cls, device_names: str = "") -> "RdmaHost":
        return cls(load_binding(), device_names)

    def register(self, buffer: Buffer) -> HostRegion | UnpinnedRegion:
        """Pins a buffer until its region is closed; do that when no transfer uses it any more. One that no
        device takes is moved through the bounce buffer instead: slower, but nothing fails."""
        [given] = as_views(buffer)
        view = memoryview(given)  # one of our own, to be released with the region
        regions: list[Region | None] = []
        refusal = ""
        for device in self.devices:
            try:
                regions.append(device.register(address_of(view), len(view), remote=False))
            except RdmaUnavailable as error:
                regions.append(None)
                refusal = str(error)
        if refusal:
            logger.warning("memory is not registered, its bytes are copied once more: %s", refusal)
        if not any(regions):
            return UnpinnedRegion(buffer)
        region = HostRegion(self, view, regions)
        with self._lock:
            self._regions.append(region)
        self.memory.add(region.entry)
        return region

    def forget(self, region: HostRegion) -> None:
        self.memory.remove(region.entry)
        with self._lock:
            self._regions.remove(region)

    def bounce(self) -> BounceBuffer | None:
        """None: no device takes it, so what is not registered cannot be moved over RDMA."""
        with self._lock:
            if self._bounce is not None:
                return self._bounce
        bounce = BounceBuffer(BOUNCE_BYTES)
        if isinstance(self.register(bounce.memory), UnpinnedRegion):
            return None
        with self._lock:
            self._bounce = self._bounce or bounce
            return self._bounce

    def close(self) -> None:
        """Ends whoever still has a queue pair, then everything else."""
        for user in list(self._users):
            user.close()
            user.join()
        for region in list(self._regions):
            region.close()
        for device in self.devices:
            device.close()
        self.devices.clear()

    def add_user(self, user: User) -> None:
        self._users.add(user)

    def remove_user(self, user: User) -> None:
        self._users.discard(user)

    def leave_to_parent(self) -> None:
        """In a forked child, instead of `close`."""
        keep_for_ever(self)


def keep_for_ever(thing: object) -> None:
    """A forked child must not free what it has inherited, not even at its end: the kernel would destroy what
    its parent is using."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
