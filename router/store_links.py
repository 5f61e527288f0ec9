"""The router's connections to stores, opened when the first thing is asked of one."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvcore.client.async_client import AsyncStoreClient
from kvcore.keys import namespace_of

logger = logging.getLogger(__name__)


class StoreLinks:
    """On the event loop's thread. `addresses`: of stores, by their ids in the cluster's book. `namespaces`:
    as hex digits; of blocks that have a name in common only those of these are dealt with, empty: all."""

    def __init__(
        self, addresses: Mapping[str, str], token: str, namespaces: frozenset[str] = frozenset()
    ) -> None:
        self.addresses = addresses
        self._namespaces = namespaces
        self._token = token
        self._clients: dict[str, AsyncStoreClient] = {}
        # One for each store: who waits for one that hangs keeps nobody from another.
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._complained: set[tuple[str, str]] = set()

    async def client(self, store: str) -> AsyncStoreClient:
        """RequestRefused when that store does not want us, ConfigError for an address that is none."""
        async with self._opening[store]:
            if store not in self._clients:
                self._clients[store] = await AsyncStoreClient.connect(
                    self.addresses[store], token=self._token, client_name="mooncake-router"
                )
        return self._clients[store]

    async def resolve(self, store: str, names: Sequence[int]) -> list[bytes] | None:
        """Keys of the blocks that the store's events name so; None when it cannot be asked. As `client`."""
        client = await self.client(store)
        keys = await client.resolve(names)
        if not client.connected:
            return None
        namespaces = self._namespaces
        return [key for key in keys if not namespaces or namespace_of(key).hex() in namespaces]

    def complain(self, store: str, text: str, reason: object) -> None:
        """Once for each store and kind of trouble: what is tried again for every request fills no log."""
        if (store, text) not in self._complained:
            self._complained.add((store, text))
            logger.warning("%s: %s", text, reason, extra={"store": store})

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
