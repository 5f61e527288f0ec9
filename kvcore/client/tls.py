"""TLS for the blocking client: what it trusts, and a socket that encrypts.

`ssl.SSLSocket` has no vectored or non-blocking-by-flag calls and must not be used by a sender and a receiver
at once, so the cipher (ssl.SSLObject) is driven here by hand between the client and its plain socket.
"""

import select
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import cast

from kvcore.client.address import Address
from kvcore.errors import ConfigError

_RECEIVE_BYTES = 256 << 10
_SEALED_BYTES = 128 << 10  # plaintext encrypted at once
_FLUSH_LIMIT_MS = 5000


def client_context(address: Address, ca: str, cert: str, key: str) -> ssl.SSLContext | None:
    """None for an address without TLS. `ca`: a file of certificates to trust, "" for those of the system.
    `cert` and `key`: files that prove who we are, where the store asks for it. ConfigError for files that
    cannot be used."""
    if not address.is_tls:
        if ca or cert or key:
            raise ConfigError(f"TLS files are given, but {address} is no tls:// address")
        return None
    if bool(cert) != bool(key):
        raise ConfigError("TLS: give the certificate and its key, or neither")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(
            f"TLS: {' or '.join(filter(None, (ca, cert, key)))} cannot be used: {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class TlsSocket:
    """What `Connection` needs of a socket. One thread may send while another receives.

    Bytes once encrypted have to be sent, in order. So when the peer takes only a part of them, `send` leaves
    one byte of what it was given to the caller, and is thus called again to send the rest.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        """Shakes hands; OSError when that fails or takes too long. Owns `sock` from then on."""
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._cipher = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        # The two directions share state inside the cipher. Never held while sending or receiving.
        self._lock = threading.Lock()
        self._sealed = memoryview(b"")
        self._owes_byte = False
        sock.settimeout(timeout_s)
        self._shake_hands()
        sock.settimeout(None)

    def fileno(self) -> int:
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    # ---- receiving -------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([buffer], 0, flags)[0]

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[object]]:
        """At least one byte, or 0 at the end of the stream. BlockingIOError as from the socket itself."""
        while True:
            with self._lock:
                size = self._decrypted(buffers)
            if size is not None:
                return size, []
            data = self._socket.recv(_RECEIVE_BYTES, flags & ~socket.MSG_WAITALL)
            with self._lock:
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()

    def _decrypted(self, buffers: Sequence[memoryview]) -> int | None:
        """None: more has to be received first."""
        total = 0
        try:
            for buffer in buffers:
                filled = 0
                while filled < len(buffer):
                    view = buffer[filled:]
                    # With a buffer it returns how many bytes it has put there; typeshed knows one form only.
                    size = cast(int, self._cipher.read(len(view), view))
                    if not size:
                        return total
                    filled += size
                    total += size
        except ssl.SSLWantReadError:
            return total or None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return total
        return total

    # ---- sending ---------------------------------------------------------------------------------------

    def send(self, data: memoryview, flags: int = 0) -> int:
        return self.sendmsg([data], (), flags)

    def sendmsg(self, buffers: Sequence[memoryview], ancdata: Sequence[object] = (), flags: int = 0) -> int:
        """How many bytes need not be given again. BlockingIOError: none."""
        owed = int(self._owes_byte)
        if owed:
            self._flush(flags)
            if self._sealed:
                raise BlockingIOError
            self._owes_byte = False
            return owed
        if not self._is_writable(0):
            raise BlockingIOError
        chunk = _chunk(buffers)
        with self._lock:
            size = self._cipher.write(chunk)
            self._sealed = memoryview(self._outgoing.read())
        self._flush(flags)
        if self._sealed and size == 1:
            self._flush_patiently()
        self._owes_byte = bool(self._sealed)
        return size - int(self._owes_byte)

    def _flush(self, flags: int) -> None:
        try:
            while self._sealed:
                self._sealed = self._sealed[self._socket.send(self._sealed, flags) :]
        except BlockingIOError:
            return

    def _flush_patiently(self) -> None:
        while self._sealed:
            if not self._is_writable(_FLUSH_LIMIT_MS):
                raise ConnectionResetError("the store takes no bytes")
            self._flush(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _is_writable(self, timeout_ms: int) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        return bool(poller.poll(timeout_ms))

    def _shake_hands(self) -> None:
        while True:
            try:
                self._cipher.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the store ended the TLS handshake") from None
                self._incoming.write(data)
        self._socket.sendall(self._outgoing.read())


def _chunk(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """The first bytes of `buffers`, without a copy where one buffer has enough."""
    if len(buffers[0]) >= _SEALED_BYTES or len(buffers) == 1:
        return buffers[0][:_SEALED_BYTES]
    parts, total = [], 0
    for buffer in buffers:
        parts.append(buffer[: _SEALED_BYTES - total])
        total += len(parts[-1])
        if total == _SEALED_BYTES:
            break
    return b"".join(parts)
