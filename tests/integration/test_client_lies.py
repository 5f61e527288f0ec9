"""A store that lies: answers of the right type with wrong fields, payloads or lengths, or that end early.

Whatever it says, a call ends with a miss or a Status: nothing raises into an engine, nobody is told of more
hits than keys, and bytes that do not match their checksums are never taken for good.
"""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.layout import granted_spans
from kvcore.transport.checksums import checksum
from kvcore.wire import messages as m
from kvcore.wire.codec import FRAME_HEADER, encode_frame, request_decoder
from kvcore.wire.messages import Status

NUM_LAYERS = 3
KEYS = [bytes([number]) * 32 for number in range(3)]
ODD_NUMBERS = [0, 1, -1, 2, 3, 255, 65_536, 1 << 32, (1 << 63) - 1, -(1 << 63)]
CALLS = 700


class Liar:
    """Accepts connections; says the truth about objects that all hold `data`, or nearly."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.data = random.Random(0).randbytes(size_bytes)
        layer_bytes = size_bytes // NUM_LAYERS
        self.layers = [self.data[begin : begin + layer_bytes] for begin in range(0, size_bytes, layer_bytes)]
        self.sums = [checksum([memoryview(layer)]) for layer in self.layers]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder = request_decoder()
        stream = connection.makefile("rb")
        while header := stream.read(FRAME_HEADER.size):
            body_bytes, payload_bytes = FRAME_HEADER.unpack(header)
            request = decoder.decode_body(stream.read(body_bytes), payload_bytes).message
            stream.read(payload_bytes)
            answer, payload = self._truth(request)
            kind = 0 if isinstance(request, m.Hello) else self.rng.randrange(8)
            if kind in (1, 2, 3):
                answer = self._bent(answer)
            elif kind == 4:
                payload = self.rng.randbytes(len(payload))
            elif kind == 5:
                answer = m.Ack(request.id)
            frame = encode_frame(answer, len(payload)) + payload
            if kind == 6:
                connection.sendall(frame[: self.rng.randrange(len(frame))])
                return
            connection.sendall(frame)

    def _truth(self, request: Any) -> tuple[Any, bytes]:
        num_keys = len(getattr(request, "keys", ()))
        if isinstance(request, m.Hello):
            limits = (1 << 20, 64 << 20, 64, 1000)
            return m.HelloReply(request.id, m.PROTOCOL_VERSION, "liar", ["tcp"], *limits), b""
        if isinstance(request, m.Read):
            begin, end = request.layer_begin, request.layer_end or NUM_LAYERS
            part = b"".join(self.layers[begin:end])
            counts = [] if request.layer_end else [end] * num_keys
            sums = self.sums[begin:end] * num_keys
            sizes = [len(part)] * num_keys
            return m.ReadReply(request.id, bytes(num_keys), sizes, sums, counts), part * num_keys
        if isinstance(request, m.Lookup):
            layers = [NUM_LAYERS] * num_keys
            return m.LookupReply(request.id, num_keys, layers, bytes(num_keys), 0.5), b""
        if isinstance(request, m.Reserve):
            grant = m.Grant(0, [], len(self.data), NUM_LAYERS)
            return m.ReserveReply(request.id, [grant] * num_keys), b""
        if isinstance(request, m.Describe):
            infos = [m.KeyInfo(key, len(self.data), 3, 3, m.Tier.DRAM, 0, 0) for key in request.keys]
            return m.DescribeReply(request.id, infos), b""
        return m.StatusReply(request.id, bytes(num_keys)), b""

    def _bent(self, value: Any) -> Any:
        """One field of an answer, or one item of it, is another."""
        rng = self.rng
        if isinstance(value, int):
            return rng.choice(ODD_NUMBERS)
        if isinstance(value, float):
            return rng.choice([float("nan"), float("inf"), -1.0])
        if isinstance(value, bytes):
            return rng.choice([b"", value[:-1], value + b"\0", rng.randbytes(len(value))])
        if isinstance(value, list):
            shorter_or_longer = [[], value[:-1], value * 2 or [1]]
            if not value or rng.random() < 0.6:
                return rng.choice(shorter_or_longer)
            index = rng.randrange(len(value))
            return [*value[:index], self._bent(value[index]), *value[index + 1 :]]
        if isinstance(value, msgspec.Struct):
            field = rng.choice([name for name in value.__struct_fields__ if name != "id"])
            return msgspec.structs.replace(value, **{field: self._bent(getattr(value, field))})
        return value


@pytest.fixture(params=[3_000, 3_000_000], ids=["small", "large"])
def liar(request: pytest.FixtureRequest) -> Iterator[Liar]:
    liar = Liar(request.param, seed=request.param)
    yield liar
    liar.close()


def calls_of(client: StoreClient, liar: Liar) -> list[Callable[[], None]]:
    data, size_bytes = liar.data, len(liar.data)

    def lookup() -> None:
        assert client.lookup(KEYS).num_hits <= len(KEYS)

    def read(layer_begin: int, layer_end: int) -> None:
        expected = b"".join(liar.layers[layer_begin : layer_end or NUM_LAYERS])
        buffers = [bytearray(len(expected)) for _ in KEYS]
        statuses = client.read_layers(KEYS, layer_begin, layer_end, buffers).wait()
        assert len(statuses) == len(KEYS)
        good = [bytes(buffer) == expected for buffer in buffers]
        # Wrong bytes come with the right checksums, wrong checksums with the right bytes.
        assert all(right for right, status in zip(good, statuses, strict=True) if status is Status.OK)

    def write() -> None:
        client.reserve(KEYS, size_bytes, NUM_LAYERS)
        client.write_layers(KEYS, 0, 1, [liar.layers[0]] * len(KEYS)).wait()
        client.abort(KEYS)

    def get() -> None:
        value = client.get("name")
        assert value is None or value == data

    def get_into() -> None:
        buffers = [bytearray(size_bytes), bytearray(size_bytes + 7)]
        sizes = client.batch_get_into(["a", "b"], buffers)
        for size, buffer in zip(sizes, buffers, strict=True):
            assert size == -1 or bytes(buffer[:size]) == data

    return [
        lookup,
        lambda: read(0, 0),
        lambda: read(1, 2),
        write,
        get,
        get_into,
        lambda: client.put("name", data) and None,
        lambda: client.batch_exists(["a", "b"]) and None,
        lambda: client.describe(["a"]) and None,
        lambda: client.remove("a") and None,
    ]


def test_nothing_that_a_store_says_raises_or_is_believed_against_checksums(liar: Liar) -> None:
    rng = random.Random(1)
    num_calls = 0
    while num_calls < CALLS:
        options: dict[str, Any] = {"planes": ("tcp",), "timeout_ms": 2_000.0, "silence_ms": 2_000.0}
        with StoreClient.connect(liar.address, **options) as client:
            calls = calls_of(client, liar)
            while client.connected and num_calls < CALLS:
                rng.choice(calls)()
                num_calls += 1


@pytest.mark.parametrize(
    ("size_bytes", "num_layers", "layers"),
    [
        (300, 0, (0, 1)),
        (300, 3, (0, 4)),
        (300, 3, (-1, 1)),
        (300, 3, (2, 2)),
        (-300, 3, (0, 3)),
        (0, 1, (0, 1)),
    ],
)
def test_grants_that_cannot_be(size_bytes: int, num_layers: int, layers: tuple[int, int]) -> None:
    assert granted_spans([0, 300], size_bytes, num_layers, *layers, 1000) is None


def test_spans_of_a_grant_lie_in_the_pool() -> None:
    assert granted_spans([100, 200, 600, 100], 300, 3, 1, 3, 1000) == (200, [(200, 100), (600, 100)])
    for extents in ([100, 200], [900, 300], [-1, 300], [100]):
        assert granted_spans(extents, 300, 3, 0, 3, 1000) == (300, None)
