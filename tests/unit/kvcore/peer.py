"""The store's end of a socket pair, played by hand or by a thread."""

import random
import socket
import threading

from kvcore.wire import messages as m
from kvcore.wire.codec import FRAME_HEADER, FRAME_HEADER_BYTES, encode_frame, request_decoder

HELLO_REPLY = m.HelloReply(1, m.PROTOCOL_VERSION, "peer", ["tcp"], 8 << 20, 1 << 30, 1000, 5000)


class Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.settimeout(20)
        self._decoder = request_decoder()

    def expect(self) -> tuple[m.Message, bytes]:
        """The next request and its payload."""
        body_bytes, payload_bytes = FRAME_HEADER.unpack(self._exactly(FRAME_HEADER_BYTES))
        frame = self._decoder.decode_body(self._exactly(body_bytes), payload_bytes)
        assert frame.message is not None
        return frame.message, self._exactly(payload_bytes)

    def greet(self, reply: m.Message = HELLO_REPLY) -> None:
        message, _ = self.expect()
        assert isinstance(message, m.Hello)
        self.reply(reply)

    def reply(self, message: m.Message, payload: bytes = b"") -> None:
        self.socket.sendall(encode_frame(message, len(payload)) + payload)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)


class EchoPeer(threading.Thread):
    """Answers every Read of key K with K repeated, holding some answers back; all else with OK."""

    def __init__(self, peer: Peer, size_bytes: int, *, seed: int = 0, holds_back: int = 0) -> None:
        super().__init__(daemon=True)
        self.peer = peer
        self.size_bytes = size_bytes
        self.rng = random.Random(seed)
        self.holds_back = holds_back

    def run(self) -> None:
        held: list[tuple[m.Message, bytes]] = []
        try:
            while True:
                message, _ = self.peer.expect()
                if isinstance(message, m.Read):
                    payload = b"".join(key * (self.size_bytes // len(key)) for key in message.keys)
                    sizes = [self.size_bytes // len(key) * len(key) for key in message.keys]
                    held.append((m.ReadReply(message.id, bytes(len(sizes)), sizes), payload))
                elif isinstance(message, m.Release):
                    held.append((m.Ack(message.id), b""))
                else:
                    held.append((m.StatusReply(message.id, bytes(len(message.keys))), b""))
                # Holding some back makes answers overtake each other; nobody waits longer than for the next.
                while len(held) > self.rng.randint(0, self.holds_back):
                    self.peer.reply(*held.pop(self.rng.randrange(len(held))))
        except OSError:
            return
