"""What posting costs: RDMA work requests made anew each time, and prebuilt ones that are used again.

    scripts/bench rdma

Two queue pairs of this process, one device each, for both verbs bindings. On soft-RoCE `post_send` does some
of the sending itself: what it takes says little about a card. What Python adds does not depend on the device.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvcore.transport.rdma_mover import LOAD_PIECES
from kvcore.transport.verbs import (
    BINDINGS,
    Binding,
    Chain,
    CompletionQueue,
    Device,
    Opcode,
    Operation,
    PathOptions,
    QueuePair,
    RdmaUnavailable,
    load_binding,
    wait_for_event,
)

MIB = 1 << 20
PIECE_BYTES = (1 << 10, 64 << 10, 256 << 10)
DEADLINE_S = 30.0


class Bench:
    """One chain's worth of requests from a buffer on one device to one on the other."""

    def __init__(self, binding: Binding, names: tuple[str, str], piece_bytes: int, rounds: int) -> None:
        self.rounds = rounds
        self.num_pieces = LOAD_PIECES
        self._devices: list[Device] = [binding.open(name) for name in names]
        self._memory = [np.ones(piece_bytes * LOAD_PIECES, np.uint8) for _ in names]
        self._regions = [
            device.register(memory.ctypes.data, memory.nbytes, remote=True)
            for device, memory in zip(self._devices, self._memory, strict=True)
        ]
        self._queues: list[CompletionQueue] = [device.completion_queue(256) for device in self._devices]
        self._pairs: list[QueuePair] = [
            device.queue_pair(queue, max_requests=128, remote_access=True)
            for device, queue in zip(self._devices, self._queues, strict=True)
        ]
        self._pairs[0].connect(self._pairs[1].address, PathOptions())
        self._pairs[1].connect(self._pairs[0].address, PathOptions())
        here, there = self._regions
        self._operations = [
            Operation(here.address + offset, piece_bytes, here.local_key, there.address + offset)
            for offset in range(0, piece_bytes * LOAD_PIECES, piece_bytes)
        ]

    def build_anew(self) -> list[float]:
        """Seconds for each round: a chain is made, filled and thrown away."""

        def once() -> Iterator[None]:
            yield
            chain = self._pairs[0].chain(LOAD_PIECES)
            self._fill(chain)
            chain.close()
            yield

        return self._times(once)

    def refill(self) -> list[float]:
        """A chain that is there is filled with other addresses."""
        chain = self._pairs[0].chain(LOAD_PIECES)

        def once() -> Iterator[None]:
            yield
            self._fill(chain)
            yield

        times = self._times(once)
        chain.close()
        return times

    def post(self, *, whole: bool) -> list[float]:
        """Handing requests over: the chain in one call, or each by itself. Completions are not in it."""
        chains = [
            self._pairs[0].chain(LOAD_PIECES if whole else 1) for _ in range(1 if whole else LOAD_PIECES)
        ]
        runs = [self._operations] if whole else [[operation] for operation in self._operations]
        for chain, run in zip(chains, runs, strict=True):
            chain.fill(Opcode.WRITE, self._regions[1].remote_key, run, 1)

        def once() -> Iterator[None]:
            yield
            for chain in chains:
                self._pairs[0].post(chain)
            yield
            self._drain(len(chains))

        times = self._times(once)
        for chain in chains:
            chain.close()
        return times

    def close(self) -> None:
        for closing in (self._pairs, self._queues, self._regions, self._devices):
            for thing in closing:
                thing.close()

    def _fill(self, chain: Chain) -> None:
        chain.fill(Opcode.WRITE, self._regions[1].remote_key, self._operations, 1)

    def _drain(self, count: int) -> None:
        queue, end = self._queues[0], time.monotonic() + DEADLINE_S
        while count:
            queue.arm()
            found = queue.poll()
            for completion in found:
                if completion.status:
                    raise RdmaUnavailable(f"a request failed: {completion}")
            count -= len(found)
            if not found and not wait_for_event(queue, end - time.monotonic()):
                raise RdmaUnavailable("no completion")

    def _times(self, once: Callable[[], Iterator[None]]) -> list[float]:
        times = []
        for _ in range(self.rounds):
            steps = once()
            next(steps)
            began = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - began)
            next(steps, None)
        return times


def report(name: str, bench: Bench, piece_bytes: int, times: list[float]) -> str:
    each_us = statistics.median(times) / bench.num_pieces * 1e6
    return f"{name:<38}{each_us:>12.2f}{each_us * MIB / piece_bytes:>14.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("devices", nargs=2, help="two devices that see each other")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    for name in BINDINGS:
        try:
            binding = load_binding(name)
        except RdmaUnavailable as error:
            print(f"{name}: {error}")
            continue
        for piece_bytes in PIECE_BYTES:
            bench = Bench(binding, tuple(options.devices), piece_bytes, options.rounds)
            print(
                f"\n{name}, {LOAD_PIECES} requests of {piece_bytes >> 10} KiB{'us/request':>17}{'us/MiB':>14}"
            )
            built, refilled = bench.build_anew(), bench.refill()
            print(report("build, before: made anew each time", bench, piece_bytes, built))
            print(report("build, after: prebuilt, filled anew", bench, piece_bytes, refilled))
            print(report("post one by one", bench, piece_bytes, bench.post(whole=False)))
            print(report("post as one chain", bench, piece_bytes, bench.post(whole=True)))
            bench.close()


if __name__ == "__main__":
    main()
