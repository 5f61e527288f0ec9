"""A directory or an object store (S3 and what speaks like it, GCS, Azure), through obstore."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

from kvcore.errors import ConfigError
from store_server.remote.backend import RemoteFailure
from store_server.remote.config import RemoteConfig

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url
except ImportError as error:
    raise ConfigError(
        "storage_levels: an object store needs obstore: pip install 'mooncake-kv-suite[remote]'"
    ) from error

_FAILURES = (BaseError, OSError)


class ObjectStoreBackend:
    """A RemoteBackend. Credentials come from `options` or from the environment (AWS_ACCESS_KEY_ID and its
    kin), as the obstore documentation names them."""

    def __init__(self, config: RemoteConfig) -> None:
        self._url = config.public_url
        settings: dict[str, Any] = dict(config.options)
        if config.scheme == "file":
            settings["mkdir"] = True
        else:
            settings["client_options"] = {
                "timeout": f"{config.timeout_ms:.0f}ms",
                "connect_timeout": f"{config.timeout_ms:.0f}ms",
                # Only whoever writes http:// into the options gets it.
                "allow_http": any(value.startswith("http://") for value in (config.url, *settings.values())),
            }
            # Going on trying is the circuit breaker's business.
            settings["retry_config"] = {
                "max_retries": 1,
                "retry_timeout": timedelta(milliseconds=config.timeout_ms),
            }
        try:
            self._store = from_url(config.url, **settings)
        except (BaseError, OSError, TypeError, ValueError) as error:
            raise ConfigError(f"storage_levels: remote {self._url}: {_reason(error)}") from error

    async def put(self, name: str, value: bytes) -> None:
        try:
            await obstore.put_async(self._store, name, value, use_multipart=False)
        except _FAILURES as error:
            raise RemoteFailure(f"{self._url}: {_reason(error)}") from error

    async def get(self, name: str) -> memoryview | None:
        try:
            answer = await obstore.get_async(self._store, name)
            return memoryview(await answer.bytes_async())
        except FileNotFoundError:
            return None
        except _FAILURES as error:
            raise RemoteFailure(f"{self._url}: {_reason(error)}") from error

    async def delete(self, names: Sequence[str]) -> None:
        try:
            await obstore.delete_async(self._store, list(names))
        except FileNotFoundError:
            # Directories name the first that is not there and leave the rest; object stores do not mind.
            for name in names:
                await self._delete_one(name)
        except _FAILURES as error:
            raise RemoteFailure(f"{self._url}: {_reason(error)}") from error

    async def _delete_one(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            pass
        except _FAILURES as error:
            raise RemoteFailure(f"{self._url}: {_reason(error)}") from error

    async def list(self) -> AsyncIterator[list[str]]:
        try:
            async for metas in obstore.list(self._store, chunk_size=1000):
                yield [meta["path"] for meta in metas]
        except _FAILURES as error:
            raise RemoteFailure(f"{self._url}: {_reason(error)}") from error

    async def close(self) -> None:
        """obstore closes its connections with the object."""


def _reason(error: Exception) -> str:
    """The first line: what follows is obstore's own stack."""
    return str(error).partition("\n")[0] or type(error).__name__
