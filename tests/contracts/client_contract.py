"""What every client promises (kvcore/client/base.py). Subclasses give it `open_client`, a factory of clients
of one and the same empty store."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore.client.base import LayerwiseStore
from kvcore.wire.messages import PinKind, Status, Tier

LAYERS, LAYER_BYTES = 3, 5_000
OBJECT_BYTES = LAYERS * LAYER_BYTES


def key_of(number: int) -> bytes:
    return b"block key" + number.to_bytes(4, "big") + bytes(19)


def value_of(number: int, size_bytes: int = OBJECT_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


class LayerwiseStoreContract:
    @pytest.fixture
    def open_client(self) -> Callable[[], Any]:
        raise AssertionError("the subclass provides open_client")

    @pytest.fixture
    def client(self, open_client):
        client = open_client()
        yield client
        client.close()

    @pytest.fixture
    def other(self, open_client):
        client = open_client()
        yield client
        client.close()

    def fill(self, client: LayerwiseStore, numbers: range) -> None:
        keys = [key_of(number) for number in numbers]
        assert client.reserve(keys, OBJECT_BYTES, LAYERS) == [Status.OK] * len(keys)
        written = client.write_layers(keys, 0, LAYERS, [value_of(number) for number in numbers])
        assert written.wait() == [Status.OK] * len(keys)

    def test_lookup_counts_leading_hits(self, client, other):
        self.fill(client, range(3))
        found = other.lookup([key_of(0), key_of(1), key_of(7), key_of(2)])
        assert (found.num_hits, list(found.layers_ready), found.available) == (2, [LAYERS] * 2, True)
        assert len(found.tiers) == 2
        assert other.lookup([]).num_hits == 0

    def test_pending_blocks_are_hits_only_when_asked_for(self, client, other):
        assert client.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.OK]
        assert client.write_layers([key_of(0)], 0, 2, [value_of(0)[: 2 * LAYER_BYTES]]).wait() == [Status.OK]
        assert other.lookup([key_of(0)]).num_hits == 0
        found = other.lookup([key_of(0)], include_pending=True)
        assert (found.num_hits, list(found.layers_ready)) == (1, [2])

    def test_the_first_writer_wins(self, client, other):
        assert client.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.OK]
        assert other.reserve([key_of(0), key_of(1)], OBJECT_BYTES, LAYERS) == [Status.PENDING, Status.OK]
        assert client.write_layers([key_of(0)], 0, LAYERS, [value_of(0)]).wait() == [Status.OK]
        assert other.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.EXISTS]

    def test_layers_stream_from_one_client_to_another(self, client, other):
        keys = [key_of(0), key_of(1)]
        got = [[bytearray(LAYER_BYTES) for _ in range(LAYERS)] for _ in keys]
        seen: list[tuple[int, list[Status], float]] = []

        def follow() -> None:
            for layer in range(LAYERS):
                buffers = [got[index][layer] for index in range(2)]
                statuses = other.read_layers(keys, layer, layer + 1, buffers, wait_ms=20_000).wait()
                seen.append((layer, statuses, time.monotonic()))

        thread = threading.Thread(target=follow)
        thread.start()
        assert client.reserve(keys, OBJECT_BYTES, LAYERS) == [Status.OK] * 2
        for layer in range(LAYERS):
            if layer == LAYERS - 1:
                while len(seen) < layer:
                    time.sleep(0.001)
                before_last = time.monotonic()
            begin, end = layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES
            pieces = [value_of(0)[begin:end], value_of(1)[begin:end]]
            assert client.write_layers(keys, layer, layer + 1, pieces).wait() == [Status.OK] * 2
        thread.join(30)
        assert [(layer, statuses) for layer, statuses, _ in seen] == [
            (layer, [Status.OK] * 2) for layer in range(LAYERS)
        ]
        assert seen[0][2] < before_last
        assert [b"".join(layers) for layers in got] == [value_of(0), value_of(1)]

    def test_registered_memory_moves_like_any_other(self, client, other):
        source, target = bytearray(value_of(1)), bytearray(OBJECT_BYTES)
        regions = [client.register(source), other.register(target)]
        assert client.reserve([key_of(1)], OBJECT_BYTES, LAYERS) == [Status.OK]
        assert client.write_layers([key_of(1)], 0, LAYERS, [source]).wait() == [Status.OK]
        assert other.read_layers([key_of(1)], 0, LAYERS, [target]).wait() == [Status.OK]
        assert target == source and [region.size_bytes for region in regions] == [OBJECT_BYTES] * 2
        for region in regions:
            region.close()

    def test_abort_tells_waiters_also_of_keys_never_reserved(self, client, other):
        assert client.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.OK]
        keys = [key_of(0), key_of(1)]
        read = other.read_layers(keys, 0, 1, [bytearray(LAYER_BYTES) for _ in keys], wait_ms=60_000)
        # Answered in order on one connection, so the read is waiting by then.
        assert other.lookup(keys).num_hits == 0
        assert not read.done()
        client.abort(keys)
        assert read.wait() == [Status.ABANDONED] * 2
        assert other.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.OK]

    def test_abort_does_not_take_back_what_is_sealed(self, client, other):
        self.fill(client, range(1))
        client.abort([key_of(0)])
        assert other.lookup([key_of(0)]).num_hits == 1

    def test_empty_batches_are_fine(self, client):
        assert client.reserve([], OBJECT_BYTES, LAYERS) == []
        assert client.write_layers([], 0, 1, []).wait() == []
        assert client.read_layers([], 0, 1, []).wait() == []
        client.abort([])

    def test_a_closed_client_answers_with_misses(self, open_client):
        client = open_client()
        assert client.connected
        client.close()
        client.close()
        assert not client.connected
        assert not client.lookup([key_of(0)]).available
        assert client.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.UNAVAILABLE]
        read = client.read_layers([key_of(0)], 0, 1, [bytearray(LAYER_BYTES)])
        assert read.wait() == [Status.UNAVAILABLE]
        written = client.write_layers([key_of(0)], 0, 1, [bytes(LAYER_BYTES)])
        assert written.wait() == [Status.UNAVAILABLE]
        client.abort([key_of(0)])

    def test_counters_are_a_flat_snapshot(self, client):
        counters = client.counters()
        assert counters["connected"] == 1 and isinstance(counters["plane"], str)
        assert all(isinstance(value, (int, str)) for value in counters.values())


class ObjectStoreContract:
    @pytest.fixture
    def open_client(self) -> Callable[[], Any]:
        raise AssertionError("the subclass provides open_client")

    @pytest.fixture
    def client(self, open_client):
        client = open_client()
        yield client
        client.close()

    @pytest.mark.parametrize("size_bytes", [1, 7, 4096, 100_003, 3 << 20])
    def test_put_then_get(self, client, size_bytes):
        value = value_of(size_bytes, size_bytes)
        assert client.put("name", value) == Status.OK
        assert client.get("name") == value
        assert client.get(b"name") == value
        buffer = bytearray(size_bytes + 5)
        assert client.get_into("name", buffer) == size_bytes
        assert buffer[:size_bytes] == value and buffer[size_bytes:] == bytes(5)

    def test_misses_are_values(self, client):
        assert client.get("absent") is None
        assert client.get_into("absent", bytearray(5)) == -1
        assert not client.exists("absent")
        assert client.remove("absent") == Status.MISSING
        assert client.pin("absent") == Status.MISSING

    def test_objects_never_change(self, client):
        assert client.put("name", b"first") == Status.OK
        assert client.put("name", b"second") == Status.EXISTS
        assert client.get("name") == b"first"
        assert client.remove("name") == Status.OK
        assert client.put("name", b"second") == Status.OK
        assert client.get("name") == b"second"

    def test_a_buffer_too_small_is_a_miss_and_stays_untouched(self, client):
        client.put("name", b"0123456789")
        buffer = bytearray(4)
        assert client.get_into("name", buffer) == -1
        assert buffer == bytes(4)
        assert client.get("name") == b"0123456789"

    def test_batches(self, client):
        numbers = range(40)
        keys = [f"key {number}" for number in numbers]
        values = [value_of(number, 100 + 3000 * (number % 7)) for number in numbers]
        assert client.batch_put_from(keys[1:], values[1:]) == [Status.OK] * 39
        assert client.batch_put_from(keys[:2], values[:2]) == [Status.OK, Status.EXISTS]
        assert client.batch_exists(["no", *keys]) == [False, *[True] * 40]
        buffers = [bytearray(20_000) for _ in range(41)]
        sizes = client.batch_get_into([*keys[:20], "no", *keys[20:]], buffers)
        assert sizes == [*map(len, values[:20]), -1, *map(len, values[20:])]
        got = [bytes(buffer[:size]) for buffer, size in zip(buffers, sizes, strict=True) if size >= 0]
        assert got == values

    def test_a_large_batch(self, client):
        keys = [f"large {number}" for number in range(12)]
        values = [value_of(number, 1 << 20) for number in range(12)]
        assert client.batch_put_from(keys, values) == [Status.OK] * 12
        buffers = [bytearray(1 << 20) for _ in keys]
        assert client.batch_get_into(keys, buffers) == [1 << 20] * 12
        assert buffers == values

    def test_keys_of_32_bytes_are_block_keys(self, client):
        assert client.put(key_of(3), b"block") == Status.OK
        listed, cursor = client.list_keys()
        assert cursor == 0 and [info.key for info in listed] == [key_of(3)]
        assert listed[0].size_bytes == 5 and listed[0].num_layers == 1

    def test_what_is_known_of_a_key(self, client):
        client.put("name", value_of(1, 5000))
        client.pin("name", PinKind.HARD)
        assert client.reserve([key_of(0)], OBJECT_BYTES, LAYERS) == [Status.OK]
        assert client.write_layers([key_of(0)], 0, 1, [value_of(0, LAYER_BYTES)]).wait() == [Status.OK]
        whole, absent, half = client.describe(["name", "absent", key_of(0)])
        assert absent is None
        assert (whole.size_bytes, whole.num_layers, whole.tier, whole.pin) == (
            5000,
            1,
            Tier.DRAM,
            PinKind.HARD,
        )
        assert (half.key, half.size_bytes, half.layers_ready) == (key_of(0), OBJECT_BYTES, 1)
        assert [client.get_size(key) for key in ("name", "absent", key_of(0))] == [5000, -1, -1]
        statuses = client.batch_status(["name", "absent", key_of(0)])
        assert statuses == [Status.OK, Status.MISSING, Status.PENDING]
        assert client.describe([]) == []
        client.abort([key_of(0)])

    def test_prefetching_what_is_there_or_nowhere(self, client):
        client.put("name", b"value")
        fetching = client.prefetch(["absent", "name"])
        assert fetching.wait() == fetching.wait() == [Status.MISSING, Status.OK]
        assert fetching.done() and client.prefetch([]).wait() == []

    def test_batches_of_pins_and_removals(self, client):
        client.batch_put_from(["a", "b"], [b"1", b"2"])
        assert client.batch_pin(["a", "absent"], PinKind.HARD) == [Status.OK, Status.MISSING]
        assert client.batch_remove(["a", "b", "absent"]) == [Status.LEASED, Status.OK, Status.MISSING]
        assert client.batch_unpin(["a", "absent"]) == [Status.OK, Status.MISSING]
        assert client.batch_remove(["a"]) == [Status.OK]

    def test_pins_protect_from_removal(self, client):
        client.put("name", b"value")
        assert client.pin("name", PinKind.HARD) == Status.OK
        assert client.remove("name") == Status.LEASED
        assert client.unpin("name") == Status.OK
        assert client.remove("name") == Status.OK
        client.put("other", b"value")
        assert client.pin("other", PinKind.HARD) == Status.OK
        assert client.remove("other", force=True) == Status.OK

    def test_evict_all_and_stats(self, client):
        client.batch_put_from(["a", "b"], [b"12345", b"678"])
        assert client.stats()["objects"] == 2
        num_objects, size_bytes = client.evict()
        assert num_objects == 2 and size_bytes >= 8
        assert client.stats()["objects"] == 0
        assert client.get("a") is None

    def test_values_may_be_arrays_and_must_be_contiguous(self, client):
        array = np.arange(600, dtype=np.float32).reshape(20, 30)
        assert client.put_from("array", array) == Status.OK
        into = np.zeros_like(array)
        assert client.get_into("array", into) == array.nbytes
        assert (into == array).all()
        with pytest.raises(TypeError):
            client.put_from("strided", array[:, ::2])
        with pytest.raises(ValueError, match="empty"):
            client.put("empty", b"")
