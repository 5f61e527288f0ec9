"""What every verbs binding promises (kvcore/transport/verbs.py). Subclass it and give it `binding` and
`device_names`, two devices that see each other."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvcore.transport.verbs import (
    Binding,
    Completion,
    CompletionQueue,
    Device,
    Opcode,
    Operation,
    PathOptions,
    QueuePair,
    RdmaUnavailable,
    Region,
    wait_for_event,
)
from tests.contracts.ticking import MAX_LOCK_WAIT_S, longest_lock_wait_s

BLOCK = 64 << 10
BLOCKS = 16
QUICK = PathOptions(timeout_exponent=12, retries=3)


class End:
    """A queue pair with memory of its own."""

    def __init__(self, device: Device, *, max_requests: int = 128) -> None:
        self.device = device
        self.memory = np.zeros(BLOCKS * BLOCK, np.uint8)
        self.base: int = self.memory.ctypes.data
        self.region: Region = device.register(self.base, self.memory.nbytes, remote=True)
        self.queue: CompletionQueue = device.completion_queue(256)
        self.pair: QueuePair = device.queue_pair(
            self.queue, max_requests=max_requests, max_receives=8, remote_access=True
        )

    def operation(self, block: int, peer: "End", peer_block: int, size_bytes: int = BLOCK) -> Operation:
        local, remote = self.base + block * BLOCK, peer.base + peer_block * BLOCK
        return Operation(local, size_bytes, self.region.local_key, remote)

    def completions(self, count: int = 1, deadline_s: float = 30.0) -> list[Completion]:
        """The next `count`, and none more after the last one."""
        found: list[Completion] = []
        end = time.monotonic() + deadline_s
        while len(found) < count:
            self.queue.arm()
            found += self.queue.poll()
            if len(found) < count:
                assert wait_for_event(self.queue, end - time.monotonic()), f"only {found} of {count}"
        return found

    def close(self) -> None:
        self.pair.close()
        self.queue.close()
        self.region.close()


class VerbsContract:
    @pytest.fixture
    def binding(self) -> Binding:
        raise AssertionError("the subclass provides the binding")

    @pytest.fixture
    def device_names(self) -> tuple[str, str]:
        raise AssertionError("the subclass names two devices")

    @pytest.fixture
    def devices(self, binding: Binding, device_names: tuple[str, str]) -> Iterator[tuple[Device, Device]]:
        opened = binding.open(device_names[0]), binding.open(device_names[1])
        yield opened
        for device in opened:
            device.close()

    @pytest.fixture
    def ends(self, devices: tuple[Device, Device]) -> Iterator[tuple[End, End]]:
        near, far = End(devices[0]), End(devices[1])
        near.memory[:] = np.random.default_rng(1).integers(0, 256, near.memory.nbytes, dtype=np.uint8)
        near.pair.connect(far.pair.address, QUICK)
        far.pair.connect(near.pair.address, QUICK)
        yield near, far
        near.close()
        far.close()

    def test_a_chain_of_writes_arrives_with_one_completion(self, ends: tuple[End, End]) -> None:
        near, far = ends
        chain = near.pair.chain(BLOCKS)
        order = np.random.default_rng(2).permutation(BLOCKS)[: BLOCKS // 2]
        chain.fill(
            Opcode.WRITE,
            far.region.remote_key,
            [near.operation(index, far, int(target)) for index, target in enumerate(order)],
            request_id=7,
        )
        near.pair.post(chain)
        assert near.completions() == [Completion(7, 0)]
        expected = np.zeros_like(far.memory)
        for index, target in enumerate(order):
            expected[target * BLOCK : (target + 1) * BLOCK] = near.memory[index * BLOCK : (index + 1) * BLOCK]
        assert np.array_equal(far.memory, expected)
        assert near.queue.poll() == []
        chain.close()

    def test_a_chain_is_used_again_for_reads_of_other_memory(self, ends: tuple[End, End]) -> None:
        near, far = ends
        far.memory[:] = np.random.default_rng(3).integers(0, 256, far.memory.nbytes, dtype=np.uint8)
        near.memory[:] = 0
        chain = near.pair.chain(8)
        for first, count in ((0, 8), (8, 3), (11, 5)):
            operations = [near.operation(first + index, far, first + index) for index in range(count)]
            chain.fill(Opcode.READ, far.region.remote_key, operations, request_id=first)
            near.pair.post(chain)
            assert near.completions() == [Completion(first, 0)]
        assert np.array_equal(near.memory, far.memory)
        chain.close()

    def test_small_writes_are_inlined_and_need_no_key(self, ends: tuple[End, End]) -> None:
        near, far = ends
        size_bytes = near.pair.max_inline_bytes
        assert size_bytes >= 32
        elsewhere = np.arange(size_bytes, dtype=np.uint8)
        chain = near.pair.chain(1)
        operation = Operation(elsewhere.ctypes.data, size_bytes, 0, far.base)
        chain.fill(Opcode.WRITE, far.region.remote_key, [operation], request_id=1)
        near.pair.post(chain)
        assert near.completions() == [Completion(1, 0)]
        assert np.array_equal(far.memory[:size_bytes], elsewhere)
        chain.close()

    def test_an_immediate_tells_the_peer_that_all_before_it_is_there(self, ends: tuple[End, End]) -> None:
        near, far = ends
        far.pair.post_receives(far.region, 2, request_id=55)
        chain = near.pair.chain(4)
        operations = [near.operation(index, far, index) for index in range(4)]
        chain.fill(
            Opcode.WRITE_WITH_IMMEDIATE, far.region.remote_key, operations, request_id=1, immediate=0xC0FFEE
        )
        near.pair.post(chain)
        assert far.completions() == [Completion(55, 0, 0xC0FFEE)]
        assert np.array_equal(far.memory[: 4 * BLOCK], near.memory[: 4 * BLOCK])
        assert near.completions() == [Completion(1, 0)]
        chain.close()

    def test_a_bad_key_breaks_the_pair_and_touches_nothing(self, ends: tuple[End, End]) -> None:
        near, far = ends
        chain = near.pair.chain(3)
        operations = [near.operation(index, far, index) for index in range(3)]
        chain.fill(Opcode.WRITE, far.region.remote_key ^ 0x5A5A00, operations, request_id=9)
        near.pair.post(chain)
        found = near.completions(3)
        assert [completion.request_id for completion in found] == [9, 9, 9]
        assert [completion.status for completion in found] == [10, 5, 5]
        assert not far.memory.any()
        chain.fill(Opcode.WRITE, far.region.remote_key, operations[:1], request_id=10)
        near.pair.post(chain)
        assert near.completions() == [Completion(10, 5)]
        chain.close()

    @pytest.mark.parametrize("excess_bytes", [1, BLOCK])
    def test_a_byte_past_the_region_is_refused(self, ends: tuple[End, End], excess_bytes: int) -> None:
        near, far = ends
        chain = near.pair.chain(1)
        past = far.base + far.memory.nbytes - BLOCK + excess_bytes
        operation = Operation(near.base, BLOCK, near.region.local_key, past)
        chain.fill(Opcode.WRITE, far.region.remote_key, [operation], request_id=1)
        near.pair.post(chain)
        assert near.completions()[0].status == 10
        chain.close()

    def test_memory_that_is_not_for_the_peer_is_refused(self, ends: tuple[End, End]) -> None:
        near, far = ends
        private = np.zeros(BLOCK, np.uint8)
        region = far.device.register(private.ctypes.data, private.nbytes, remote=False)
        chain = near.pair.chain(1)
        operation = Operation(near.base, BLOCK, near.region.local_key, region.address)
        chain.fill(Opcode.WRITE, region.remote_key, [operation], request_id=1)
        near.pair.post(chain)
        assert near.completions()[0].status == 10
        assert not private.any()
        chain.close()
        region.close()

    def test_what_is_deregistered_is_refused(self, ends: tuple[End, End]) -> None:
        near, far = ends
        region = far.device.register(far.base, BLOCK, remote=True)
        key = region.remote_key
        region.close()
        chain = near.pair.chain(1)
        chain.fill(Opcode.READ, key, [near.operation(0, far, 0)], request_id=1)
        near.pair.post(chain)
        assert near.completions()[0].status == 10
        chain.close()

    def test_a_peer_that_is_gone_is_noticed(self, ends: tuple[End, End]) -> None:
        near, far = ends
        far.pair.close()
        chain = near.pair.chain(1)
        chain.fill(Opcode.WRITE, far.region.remote_key, [near.operation(0, far, 0)], request_id=1)
        near.pair.post(chain)
        assert near.completions()[0].status == 12
        assert not far.memory.any()
        chain.close()

    def test_a_closed_pair_takes_nothing(self, ends: tuple[End, End]) -> None:
        near, _ = ends
        fresh = near.device.queue_pair(near.queue, max_requests=4)
        chain = fresh.chain(1)
        chain.fill(Opcode.WRITE, 1, [Operation(near.base, BLOCK, near.region.local_key, 0)], request_id=1)
        with pytest.raises(RdmaUnavailable):
            fresh.post(chain)
        chain.close()
        fresh.close()
        fresh.close()

    def test_waiting_keeps_pythons_lock_from_nobody(self, ends: tuple[End, End]) -> None:
        near, far = ends
        chain = near.pair.chain(1)
        chain.fill(Opcode.WRITE, far.region.remote_key, [near.operation(0, far, 0)], request_id=1)
        near.queue.arm()
        lock_waits: list[float] = []

        def tick_then_post() -> None:
            # Again, if the other thread lost its CPU on its way into the wait, with the lock in its hands.
            while len(lock_waits) < 5 and min(lock_waits, default=1.0) > MAX_LOCK_WAIT_S:
                time.sleep(0.02)
                lock_waits.append(longest_lock_wait_s(0.2))
            near.pair.post(chain)

        thread = threading.Thread(target=tick_then_post)
        thread.start()
        assert wait_for_event(near.queue, 30.0)
        assert min(lock_waits) < MAX_LOCK_WAIT_S
        thread.join()
        assert near.completions() == [Completion(1, 0)]
        assert not wait_for_event(near.queue, 0.05)
        chain.close()

    def test_retries_that_would_last_for_ever_are_refused(self) -> None:
        with pytest.raises(ValueError, match="for ever"):
            PathOptions(retries=7)
        with pytest.raises(ValueError, match="for ever"):
            PathOptions(timeout_exponent=0)
