"""Connections of this store to others, as an ordinary client of them: opened when there is something to copy,
kept for a while, closed when nobody has wanted them."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from kvcore.client.address import parse_address
from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError, RequestRefused
from store_server.peers_config import PeersConfig

logger = logging.getLogger(__name__)

_IDLE_S = 60.0


class Peer:
    """One client, open when `opening` is done. Whoever took it gives it back."""

    def __init__(self, name: tuple[str, str], opening: "asyncio.Task[StoreClient]") -> None:
        self.name = name
        self.opening = opening
        self.num_users = 0
        self.closing: asyncio.TimerHandle | None = None

    @property
    def client(self) -> StoreClient:
        return self.opening.result()


class Peers:
    """Used in the store's loop; what blocks runs on `threads`, and closing on the loop's own."""

    def __init__(
        self, config: PeersConfig, threads: Executor, planes: Sequence[str], device_name: str
    ) -> None:
        """`planes` and `device_name` as StoreClient has them."""
        self._config = config
        self._planes = planes
        self._device_name = device_name
        self._threads = threads
        self._peers: dict[tuple[str, str], Peer] = {}
        self._closings: set[asyncio.Future[None]] = set()

    async def take(self, source: str, token: str) -> Peer | None:
        """None when the source does not want us, or our files for it cannot be used."""
        name = (source, token)
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name, asyncio.create_task(self._open(source, token)))
        if peer.closing is not None:
            peer.closing.cancel()
            peer.closing = None
        peer.num_users += 1
        try:
            await peer.opening
        except Exception as error:
            if self._peers.get(name) is peer:
                del self._peers[name]
                logger.warning("nothing can be copied", extra={"source": source, "reason": str(error)})
            if not isinstance(error, RequestRefused | ConfigError):
                raise
            return None
        return peer

    def give_back(self, peer: Peer) -> None:
        peer.num_users -= 1
        if peer.num_users or self._peers.get(peer.name) is not peer:
            return
        # A client without a store goes on looking for it: only who was there a moment ago is worth that.
        idle_s = _IDLE_S if peer.client.connected else 0.0
        peer.closing = asyncio.get_running_loop().call_later(idle_s, self._close, peer)

    async def close(self) -> None:
        """What is still being read from them ends with UNAVAILABLE."""
        for peer in list(self._peers.values()):
            with contextlib.suppress(RequestRefused, ConfigError):
                await peer.opening
                self._close(peer)
        await asyncio.gather(*self._closings)

    def _close(self, peer: Peer) -> None:
        if self._peers.get(peer.name) is not peer:
            return
        del self._peers[peer.name]
        if peer.closing is not None:
            peer.closing.cancel()
        # It may have to wait for an attempt to connect.
        closing = asyncio.get_running_loop().run_in_executor(None, peer.client.close)
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    async def _open(self, source: str, token: str) -> StoreClient:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._connect, source, token)

    def _connect(self, source: str, token: str) -> StoreClient:
        try:
            return self._client(source, token, self._planes)
        except ConfigError:
            without_rdma = [plane for plane in self._planes if plane != "rdma"]
            if len(without_rdma) == len(self._planes):
                raise
            # The devices were there when this store started; one may have gone since.
            return self._client(source, token, without_rdma)

    def _client(self, source: str, token: str, planes: Sequence[str]) -> StoreClient:
        config = self._config
        is_tls = parse_address(source).is_tls
        return StoreClient.connect(
            source,
            token=token,
            planes=planes,
            device_name=self._device_name,
            timeout_ms=config.answer_timeout_ms,
            connect_timeout_ms=config.answer_timeout_ms,
            silence_ms=config.answer_timeout_ms,
            client_name="mooncake-store",
            verify_shm=True,  # it is going to be served to others as if its writer had brought it here
            tls_ca=config.tls_ca if is_tls else "",
            tls_cert=config.tls_cert if is_tls else "",
            tls_key=config.tls_key if is_tls else "",
        )
