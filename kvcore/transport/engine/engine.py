"""The interface of the transfer engine: registerLocalMemory, submitTransfer, getTransferStatus in Python
form."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcore.errors import ConfigError, LocalProtocolError
from kvcore.transport.device_memory import (
    StagingNeeded,
    find_exporter,
    memory_of,
    peermem_is_loaded,
    register,
)
from kvcore.transport.engine.batch import (
    Batch,
    RequestProgress,
    Segment,
    TransferRequest,
    TransferStatus,
)
from kvcore.transport.engine.cards import Card, open_cards
from kvcore.transport.engine.config import EngineConfig
from kvcore.transport.engine.connector import Connector
from kvcore.transport.engine.counters import EngineCounters
from kvcore.transport.engine.memory import LocalMemory, MemoryTable
from kvcore.transport.engine.numa import place_of
from kvcore.transport.engine.routes import tiers_between
from kvcore.transport.engine.server import EngineServer
from kvcore.transport.engine.worker import Worker
from kvcore.transport.slices import Route, Slice, cut
from kvcore.transport.topology import ANYWHERE, Matrix, discover, restrict
from kvcore.transport.topology_sysfs import read_host
from kvcore.transport.verbs import Binding, RdmaUnavailable, Region, choose_devices, load_binding

logger = logging.getLogger(__name__)


class TransferEngine:
    """All methods may be called from any thread. Close it when done; it is a context manager, too.

    Raises ConfigError for settings that make no sense, and RdmaUnavailable when `protocol` is rdma and there
    is no device; with auto it then goes over TCP. `binding`: other verbs than those of this host, for tests.
    """

    def __init__(self, config: EngineConfig | None = None, *, binding: Binding | None = None) -> None:
        self.config = config or EngineConfig()
        self.config.check()
        self._counters = EngineCounters()
        self._memories = MemoryTable()
        self._cards, self.reason = self._open_cards(binding)
        self._matrix = self._find_matrix()
        self._takes_tcp = self.config.protocol != "rdma"
        self._worker = Worker(
            self._cards,
            self._counters,
            max_endpoints=self.config.max_endpoints,
            retry=self.config.retry,
            on_done=self._on_done,
        )
        self._connector = Connector(
            self._cards,
            token=self.config.token,
            timeout_s=self.config.handshake_timeout_ms / 1e3,
            on_tcp_end=self._worker.on_tcp_end,
        )
        self._worker.start(self._connector)
        self._server = EngineServer(
            self.config.host,
            self.config.port,
            token=self.config.token,
            memories=self._memories,
            cards=self._cards,
            matrix=self._matrix,
            takes_tcp=self._takes_tcp,
        )
        self._is_closed = False
        logger.info("transfer engine at %s: %s", self.address, self.reason)

    @property
    def address(self) -> str:
        """What peers give to `open_segment`."""
        return f"{self.config.host}:{self._server.port}"

    # ---- memory

    def register_local_memory(self, buffer: Any, *, place: str = ANYWHERE) -> LocalMemory:
        """Makes a writable buffer (numpy array, bytearray, memoryview...) part of this engine; it is kept
        alive until it is unregistered. `place`: "cpu:0" or the like, as in topology.py; found out by itself
        if not given.

        RdmaUnavailable when a card refuses it, ConfigError when some of it is registered already.
        """
        array = np.frombuffer(buffer, dtype=np.uint8)
        if not array.flags.writeable:
            raise ConfigError("memory must be writable to be registered: peers may write to it")
        address = int(array.ctypes.data)
        place = place if place != ANYWHERE else place_of(address)

        def make_known(card: Card) -> Region:
            return card.device.register(address, array.nbytes, remote=True)

        return self._register(address, array.nbytes, place, make_known, is_host=True, owner=array)

    def register_tensor(self, tensor: Any) -> LocalMemory:
        """A contiguous torch tensor, on a GPU or the CPU; kept alive until it is unregistered.

        StagingNeeded when a card does not get to the GPU's memory: then move a copy in host memory instead.
        """
        memory = memory_of(tensor)
        exporter, has_peermem = find_exporter(memory), peermem_is_loaded()
        place = memory.place or place_of(memory.address)
        if not self._cards and not memory.is_host:
            raise StagingNeeded(f"memory of {memory.place} cannot be moved over {self.reason}")

        def make_known(card: Card) -> Region:
            return register(card.device, memory, exporter=exporter, has_peermem=has_peermem, remote=True)

        return self._register(
            memory.address, memory.size_bytes, place, make_known, is_host=memory.is_host, owner=tensor
        )

    def unregister_local_memory(self, memory: LocalMemory) -> None:
        """LocalProtocolError while transfers of ours use it. Those of peers fail from now on."""
        self._memories.remove(memory.address).close()

    # ---- peers and transfers

    def open_segment(self, address: str) -> Segment:
        """What the engine at "host:port" has registered. Blocks for one round trip; StoreUnavailable when
        nobody answers, RequestRefused for a wrong token."""
        self._check_open()
        return self._connector.describe(address)

    def submit_transfer(
        self, requests: Sequence[TransferRequest], *, timeout_ms: float | None = None
    ) -> Batch:
        """Starts moving and returns at once. ValueError, and nothing is moved, when a request names memory
        that is not registered here or was not at the peer when its segment was opened, or that no path leads
        to."""
        self._check_open()
        patience_ms = self.config.timeout_ms if timeout_ms is None else timeout_ms
        batch = Batch(time.monotonic() + patience_ms / 1e3)
        progress: list[RequestProgress] = []
        slices: list[Slice] = []
        try:
            for request in requests:
                item, route = self._plan(batch, request)
                progress.append(item)
                pieces = cut(item, route, request.size_bytes, self.config.slice_bytes)
                item.pending = len(pieces)
                slices += pieces
        except ValueError:
            self._give_back(progress)
            raise
        batch.progress = progress
        if not slices:
            batch.done.set()
            return batch
        self._worker.submit(batch, slices)
        return batch

    def get_transfer_status(self, batch: Batch) -> list[TransferStatus]:
        """One a request. Never blocks and never raises."""
        return [item.status() for item in batch.progress]

    def wait(self, batch: Batch, timeout_ms: float | None = None) -> list[TransferStatus]:
        """Until all have ended, or `timeout_ms` is over: the transfers themselves then go on until theirs
        is."""
        batch.done.wait(None if timeout_ms is None else timeout_ms / 1e3)
        return self.get_transfer_status(batch)

    def counters(self) -> dict[str, int]:
        """For people and metrics: made, failed and evicted endpoints, retried slices, and bytes by card."""
        sent = {f"{name}_bytes": card.sent_bytes for name, card in self._cards.items()}
        fields = self._counters.__struct_fields__
        return {**{name: getattr(self._counters, name) for name in fields}, **sent}

    def close(self) -> None:
        """Fails what is under way. Memory is unregistered and may be used otherwise when it returns."""
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.close()
        self._server.close()
        for memory in self._memories.clear():
            memory.close()
        for card in self._cards.values():
            card.close()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- inside

    def _open_cards(self, binding: Binding | None) -> tuple[dict[str, Card], str]:
        config = self.config
        if config.protocol == "tcp":
            return {}, "tcp, as configured"
        try:
            binding = binding or load_binding()
            names = choose_devices(binding, config.device_name)
            cards = open_cards(
                binding,
                names,
                max_requests=config.max_requests,
                max_endpoints=config.max_endpoints,
                options=config.path,
            )
        except RdmaUnavailable as error:
            if config.protocol == "rdma":
                raise
            return {}, f"tcp, because {error}"
        return cards, f"rdma over {', '.join(cards)}"

    def _find_matrix(self) -> Matrix:
        matrix = restrict(self.config.matrix() or discover(read_host()), list(self._cards))
        known = {name for cards in matrix.values() for name in (*cards.preferred, *cards.others)}
        if missing := [name for name in self._cards if name not in known]:
            # Cards that neither sysfs nor the file knows are as near as any.
            matrix = {
                place: cards._replace(preferred=(*cards.preferred, *missing))
                for place, cards in matrix.items()
            }
        return matrix

    def _register(
        self,
        address: int,
        size_bytes: int,
        place: str,
        make_known: Callable[[Card], Region],
        *,
        is_host: bool,
        owner: object,
    ) -> LocalMemory:
        self._check_open()
        if size_bytes < 1:
            raise ConfigError("memory of no bytes cannot be registered")
        regions: dict[str, Region] = {}
        memory = LocalMemory(address, size_bytes, place, is_host=is_host, regions=regions, owner=owner)
        try:
            for name, card in self._cards.items():
                regions[name] = make_known(card)
            self._memories.add(memory)
        except BaseException:
            memory.close()
            raise
        return memory

    def _plan(self, batch: Batch, request: TransferRequest) -> tuple[RequestProgress, Route]:
        if request.size_bytes < 1:
            raise ValueError("a transfer of no bytes")
        remote = request.segment.memory_at(request.target, request.size_bytes)
        if remote is None:
            raise ValueError(
                f"{request.segment.address} has no memory registered for {request.size_bytes} bytes at "
                f"{request.target:#x}; open_segment again if it registered it since"
            )
        local = self._memories.take(request.source, request.size_bytes)
        if local is None:
            raise ValueError(
                f"no memory is registered here for {request.size_bytes} bytes at {request.source:#x}"
            )
        tiers = tiers_between(self._matrix, local, request.segment, remote, with_tcp=self._takes_tcp)
        if not tiers:
            self._memories.give(local)
            raise ValueError(f"no path leads from memory at {local.place} here to {remote.place} there")
        family = (request.segment.address, request.direction, local.address, remote.address)
        return RequestProgress(batch, request, local, remote), Route(family, tiers)

    def _on_done(self, batch: Batch) -> None:
        self._give_back(batch.progress)
        batch.done.set()

    def _give_back(self, progress: Sequence[RequestProgress]) -> None:
        for item in progress:
            self._memories.give(item.local)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("this transfer engine is closed")
