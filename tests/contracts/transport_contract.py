"""What every plane promises (kvcore/transport/base.py). Subclass it and give it a `rig`."""

import itertools
import threading
from typing import Protocol

import numpy as np
import pytest

from kvcore.transport.base import ReadBatch, Transport, WriteBatch
from kvcore.wire.messages import Status

LAYERS, LAYER_BYTES = 4, 12_000
OBJECT_BYTES = LAYERS * LAYER_BYTES


class Peer(Protocol):
    """One client of the store under test: its plane, and the control it takes to use a plane."""

    transport: Transport

    def reserve(self, keys: list[bytes], size_bytes: int, num_layers: int) -> list[Status]: ...
    def abort(self, keys: list[bytes]) -> None: ...


class Rig(Protocol):
    def open(self) -> Peer: ...


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def payload_of(number: int, size_bytes: int = OBJECT_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


class TransportContract:
    @pytest.fixture
    def rig(self) -> Rig:
        raise AssertionError("the subclass provides the rig")

    @pytest.fixture
    def writer(self, rig: Rig) -> Peer:
        return rig.open()

    @pytest.fixture
    def reader(self, rig: Rig) -> Peer:
        return rig.open()

    def store(self, peer: Peer, numbers: range) -> None:
        keys = [key_of(number) for number in numbers]
        assert peer.reserve(keys, OBJECT_BYTES, LAYERS) == [Status.OK] * len(keys)
        values = [payload_of(number) for number in numbers]
        batch = WriteBatch(keys=keys, buffers=values, layer_begin=0, layer_end=LAYERS)
        assert peer.transport.submit(batch).wait() == [Status.OK] * len(keys)

    def settle(self, peer: Peer) -> None:
        """Whatever this peer has submitted before has reached the store when this returns."""
        probe = ReadBatch(keys=[key_of(999)], buffers=[bytearray(1)])
        assert peer.transport.submit(probe).wait() == [Status.MISSING]

    def test_what_is_written_is_read(self, writer: Peer, reader: Peer) -> None:
        self.store(writer, range(3))
        buffers = [bytearray(OBJECT_BYTES) for _ in range(3)]
        batch = ReadBatch(keys=[key_of(number) for number in range(3)], buffers=buffers)
        transfer = reader.transport.submit(batch)
        assert transfer.wait() == [Status.OK] * 3
        assert transfer.done() and transfer.wait() == [Status.OK] * 3
        assert buffers == [payload_of(number) for number in range(3)]

    def test_layers_may_lie_in_different_buffers(self, writer: Peer, reader: Peer) -> None:
        whole = np.frombuffer(payload_of(5), dtype=np.uint8).reshape(LAYERS, LAYER_BYTES)
        assert writer.reserve([key_of(5)], OBJECT_BYTES, LAYERS) == [Status.OK]
        pieces = [whole[0][:100], whole[0][100:], whole[1], whole[2].reshape(30, 400), whole[3]]
        batch = WriteBatch(keys=[key_of(5)], buffers=[pieces], layer_begin=0, layer_end=LAYERS)
        assert writer.transport.submit(batch).wait() == [Status.OK]
        into = [np.zeros(LAYER_BYTES, np.uint8), np.zeros((2, 3000), np.float16)]
        read = ReadBatch(keys=[key_of(5)], buffers=[into], layer_begin=1, layer_end=3)
        assert reader.transport.submit(read).wait() == [Status.OK]
        assert (into[0] == whole[1]).all() and into[1].tobytes() == whole[2].tobytes()

    def test_each_key_has_its_own_status(self, writer: Peer, reader: Peer) -> None:
        self.store(writer, range(1))
        assert writer.reserve([key_of(1)], OBJECT_BYTES, LAYERS) == [Status.OK]
        buffers = [bytearray(OBJECT_BYTES), bytearray(OBJECT_BYTES), bytearray(OBJECT_BYTES), bytearray(7)]
        keys = [key_of(2), key_of(0), key_of(1), key_of(0)]
        statuses = reader.transport.submit(ReadBatch(keys=keys, buffers=buffers)).wait()
        assert statuses == [Status.MISSING, Status.OK, Status.PENDING, Status.INVALID]
        assert buffers[1] == payload_of(0)

    def test_a_read_follows_its_writer_layer_by_layer(self, writer: Peer, reader: Peer) -> None:
        value, got = payload_of(9), [bytearray(LAYER_BYTES) for _ in range(LAYERS)]
        reads = [
            reader.transport.submit(
                ReadBatch(
                    keys=[key_of(9)],
                    buffers=[got[layer]],
                    layer_begin=layer,
                    layer_end=layer + 1,
                    wait_ms=20_000,
                )
            )
            for layer in range(LAYERS)
        ]
        assert writer.reserve([key_of(9)], OBJECT_BYTES, LAYERS) == [Status.OK]
        for layer in range(LAYERS):
            assert not reads[layer].done()
            piece = value[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
            batch = WriteBatch(keys=[key_of(9)], buffers=[piece], layer_begin=layer, layer_end=layer + 1)
            assert writer.transport.submit(batch).wait() == [Status.OK]
            assert reads[layer].wait() == [Status.OK] and got[layer] == piece

    def test_a_wait_ends_in_time(self, reader: Peer) -> None:
        read = ReadBatch(keys=[key_of(3)], buffers=[bytearray(OBJECT_BYTES)], wait_ms=50)
        assert reader.transport.submit(read).wait() == [Status.TIMED_OUT]
        waiting = ReadBatch(keys=[key_of(3)], buffers=[bytearray(OBJECT_BYTES)], wait_ms=60_000)
        assert reader.transport.submit(waiting).wait(timeout_ms=50) == [Status.TIMED_OUT]

    def test_after_a_timeout_the_buffer_is_the_callers(self, writer: Peer, reader: Peer) -> None:
        buffer = bytearray(OBJECT_BYTES)
        late = reader.transport.submit(ReadBatch(keys=[key_of(0)], buffers=[buffer], wait_ms=30_000))
        assert late.wait(timeout_ms=20) == [Status.TIMED_OUT]
        self.store(writer, range(1))
        again = bytearray(OBJECT_BYTES)
        fresh = reader.transport.submit(ReadBatch(keys=[key_of(0)], buffers=[again], wait_ms=30_000))
        assert fresh.wait() == [Status.OK] and again == payload_of(0)
        assert buffer == bytes(OBJECT_BYTES)
        assert late.wait() == [Status.TIMED_OUT]

    def test_abort_wakes_readers(self, writer: Peer, reader: Peer) -> None:
        keys = [key_of(6), key_of(7)]
        assert writer.reserve(keys[:1], OBJECT_BYTES, LAYERS) == [Status.OK]
        read = reader.transport.submit(
            ReadBatch(keys=keys, buffers=[bytearray(OBJECT_BYTES) for _ in keys], wait_ms=60_000)
        )
        self.settle(reader)
        assert not read.done()
        writer.abort(keys)
        assert read.wait() == [Status.ABANDONED] * 2
        late = ReadBatch(keys=keys, buffers=[bytearray(OBJECT_BYTES) for _ in keys], wait_ms=60_000)
        assert reader.transport.submit(late).wait(10_000) == [Status.ABANDONED] * 2

    def test_writes_out_of_order_or_of_the_wrong_size_are_invalid(self, writer: Peer, reader: Peer) -> None:
        assert writer.reserve([key_of(4)], OBJECT_BYTES, LAYERS) == [Status.OK]

        def write(peer: Peer, begin: int, end: int, size_bytes: int) -> list[Status]:
            batch = WriteBatch(
                keys=[key_of(4)], buffers=[bytes(size_bytes)], layer_begin=begin, layer_end=end
            )
            return peer.transport.submit(batch).wait()

        assert write(writer, 1, 2, LAYER_BYTES) == [Status.INVALID]
        assert write(writer, 0, 1, LAYER_BYTES - 1) == [Status.INVALID]
        assert write(writer, 0, 1, LAYER_BYTES) == [Status.OK]
        assert write(writer, 0, 1, LAYER_BYTES) == [Status.INVALID]
        assert write(writer, 1, LAYERS + 1, LAYERS * LAYER_BYTES) == [Status.INVALID]
        assert write(reader, 1, 2, LAYER_BYTES) == [Status.ABANDONED]
        assert write(writer, 1, LAYERS, OBJECT_BYTES - LAYER_BYTES) == [Status.OK]

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (ReadBatch, {"keys": [key_of(1)], "buffers": []}),
            (ReadBatch, {"keys": [key_of(1)], "buffers": [bytearray(1)], "layer_begin": 2, "layer_end": 1}),
            (WriteBatch, {"keys": [key_of(1)], "buffers": [b"1"], "layer_begin": 0, "layer_end": 0}),
            (
                WriteBatch,
                {
                    "keys": [key_of(1)],
                    "buffers": [b"1"],
                    "layer_begin": 0,
                    "layer_end": 2,
                    "checksums": [1],
                },
            ),
        ],
    )
    def test_senseless_batches_are_refused(self, writer: Peer, kind: type, fields: dict[str, object]) -> None:
        with pytest.raises(ValueError):
            writer.transport.submit(kind(**fields))

    def test_many_threads_share_one_plane(self, writer: Peer, reader: Peer) -> None:
        self.store(writer, range(16))
        failures: list[object] = []

        def work(seed: int) -> None:
            order = np.random.default_rng(seed).permutation(16)
            for first, second in itertools.pairwise(order):
                buffers = [bytearray(OBJECT_BYTES), bytearray(OBJECT_BYTES)]
                read = ReadBatch(keys=[key_of(int(first)), key_of(int(second))], buffers=buffers)
                statuses = reader.transport.submit(read).wait()
                if statuses != [Status.OK] * 2 or buffers != [
                    payload_of(int(first)),
                    payload_of(int(second)),
                ]:
                    failures.append((first, second, statuses))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == [] and not any(thread.is_alive() for thread in threads)

    def test_large_reads_and_writes_in_flight_together_do_not_block_each_other(
        self, writer: Peer, reader: Peer
    ) -> None:
        size_bytes, count = 6 << 20, 3
        keys = [key_of(100 + number) for number in range(count)]
        assert writer.reserve(keys, size_bytes, 1) == [Status.OK] * count
        values = [payload_of(number, size_bytes) for number in range(count)]
        write = WriteBatch(keys=keys, buffers=values, layer_begin=0, layer_end=1)
        assert writer.transport.submit(write).wait() == [Status.OK] * count
        more = [key_of(200 + number) for number in range(count)]
        assert reader.reserve(more, size_bytes, 1) == [Status.OK] * count
        buffers = [bytearray(size_bytes) for _ in keys]
        pull = reader.transport.submit(ReadBatch(keys=keys, buffers=buffers))
        push = reader.transport.submit(WriteBatch(keys=more, buffers=values, layer_begin=0, layer_end=1))
        assert push.wait() == [Status.OK] * count
        assert pull.wait() == [Status.OK] * count and buffers == values

    def test_close_fails_what_is_in_flight(self, rig: Rig) -> None:
        peer = rig.open()
        read = peer.transport.submit(
            ReadBatch(keys=[key_of(8)], buffers=[bytearray(OBJECT_BYTES)], wait_ms=60_000)
        )
        peer.transport.close()
        assert read.wait() == [Status.UNAVAILABLE]
        after = peer.transport.submit(ReadBatch(keys=[key_of(8)], buffers=[bytearray(OBJECT_BYTES)]))
        assert after.wait() == [Status.UNAVAILABLE]

    def test_reservations_die_with_their_client(self, rig: Rig, reader: Peer) -> None:
        peer = rig.open()
        assert peer.reserve([key_of(8)], OBJECT_BYTES, LAYERS) == [Status.OK]
        half = WriteBatch(
            keys=[key_of(8)], buffers=[payload_of(8)[: 2 * LAYER_BYTES]], layer_begin=0, layer_end=2
        )
        assert peer.transport.submit(half).wait() == [Status.OK]
        waiting = reader.transport.submit(
            ReadBatch(keys=[key_of(8)], buffers=[bytearray(OBJECT_BYTES)], wait_ms=60_000)
        )
        self.settle(reader)
        assert not waiting.done()
        peer.transport.close()
        assert waiting.wait() == [Status.ABANDONED]
        assert reader.reserve([key_of(8)], OBJECT_BYTES, LAYERS) == [Status.OK]

    def test_registered_memory_stays_the_callers(self, writer: Peer) -> None:
        buffer = bytearray(4096)
        region = writer.transport.register(buffer)
        assert region.size_bytes == 4096
        region.close()
        buffer.append(1)
