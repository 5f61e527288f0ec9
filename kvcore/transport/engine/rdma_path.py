"""Runs of slices over one queue pair."""

from collections.abc import Mapping
from typing import NamedTuple

from kvcore.transport.endpoints import EndpointKey
from kvcore.transport.engine.batch import Direction, RequestProgress
from kvcore.transport.engine.cards import Card
from kvcore.transport.slices import Run, Slice
from kvcore.transport.verbs import Chain, Opcode, Operation, QueuePair

CHAINS = 4
"""Under way at once: the card goes on with the next while we look at the completion of one."""

OPCODES: Mapping[Direction, Opcode] = {Direction.READ: Opcode.READ, Direction.WRITE: Opcode.WRITE}


class Ended(NamedTuple):
    """`status` 0: all of the run is there."""

    run: Run
    status: int


class RdmaPath:
    """The worker's. Request ids are `serial` * CHAINS + the chain's number, so that completions find their
    way back."""

    def __init__(self, key: EndpointKey, card: Card, pair: QueuePair, peer_number: int, serial: int) -> None:
        self.key = key
        self.card = card
        self.serial = serial
        self.peer_number = peer_number
        self._pair = pair
        capacity = max(1, card.max_requests // CHAINS)
        self._chains: list[Chain] = [pair.chain(capacity) for _ in range(CHAINS)]
        self._runs: list[Run | None] = [None] * CHAINS
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        return any(run is not None for run in self._runs)

    def runs(self) -> list[Run]:
        """What is under way."""
        return [run for run in self._runs if run is not None]

    def room(self) -> int:
        """Slices that it takes now."""
        return self._chains[0].capacity if None in self._runs and not self._is_closed else 0

    def start(self, run: Run) -> None:
        """RdmaUnavailable: the card took nothing or not all of it, and this path is of no use any more."""
        number = self._runs.index(None)
        chain, first = self._chains[number], _progress_of(run.slices[0])
        key = first.remote.keys[self.key.peer_device]
        operations = [self._operation(item) for item in run.slices]
        opcode = OPCODES[first.request.direction]
        chain.fill(opcode, key.key, operations, self.serial * CHAINS + number)
        self._runs[number] = run
        self._pair.post(chain)

    def ended(self, request_id: int, status: int) -> Ended | None:
        """What a completion means; None for a later one of a chain that has failed already."""
        number = request_id % CHAINS
        run, self._runs[number] = self._runs[number], None
        return None if run is None else Ended(run, status)

    def close(self) -> list[Run]:
        """Destroys the queue pair: the card touches none of our memory for it any more. Returns what was
        under way."""
        self._is_closed = True
        self._pair.close()
        for chain in self._chains:
            chain.close()
        left = self.runs()
        self._runs = [None] * CHAINS
        return left

    def _operation(self, item: Slice) -> Operation:
        progress = _progress_of(item)
        request, local = progress.request, progress.local
        region = local.regions[self.key.device]
        base = progress.remote.keys[self.key.peer_device].base
        return Operation(
            region.address + (request.source - local.address) + item.offset,
            item.size_bytes,
            region.local_key,
            base + (request.target - progress.remote.address) + item.offset,
        )


def _progress_of(item: Slice) -> RequestProgress:
    progress = item.request
    assert isinstance(progress, RequestProgress)
    return progress
