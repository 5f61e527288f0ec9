"""The backends against the real things: a directory, a Valkey server, a server that speaks S3."""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from store_server.remote.backend import RemoteFailure, make_backend
from store_server.remote.config import RemoteConfig
from store_server.remote.redis_server import PREFIX
from tests.contracts.remote_contract import RemoteBackendContract
from tests.remotes import S3_OPTIONS, ValkeyServer, make_bucket, s3_server, valkey_server

_numbers = itertools.count()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mks-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def valkey(directory: Path) -> Iterator[ValkeyServer]:
    with valkey_server(directory) as server:
        yield server


@pytest.fixture(scope="module")
def s3_endpoint(directory: Path) -> Iterator[str]:
    with s3_server(directory) as endpoint:
        yield endpoint


class TestDirectory(RemoteBackendContract):
    @pytest.fixture
    def remote(self, tmp_path: Path) -> RemoteConfig:
        return RemoteConfig(url=f"file://{tmp_path}/made/by/us")


class TestValkey(RemoteBackendContract):
    @pytest.fixture
    def remote(self, valkey: ValkeyServer) -> Iterator[RemoteConfig]:
        client = valkey.client()
        client.flushall()
        client.set("not-ours", "stays")
        yield RemoteConfig(url=valkey.url)
        assert client.get("not-ours") == b"stays"
        client.close()


class TestS3(RemoteBackendContract):
    @pytest.fixture
    def remote(self, s3_endpoint: str) -> RemoteConfig:
        bucket = f"kv{next(_numbers)}"
        make_bucket(s3_endpoint, bucket)
        return RemoteConfig(
            url=f"s3://{bucket}/some/prefix",
            options={**S3_OPTIONS, "endpoint": s3_endpoint},
            timeout_ms=60_000,
        )


def test_keys_in_valkey_have_a_prefix(valkey: ValkeyServer) -> None:
    async def work() -> None:
        backend = make_backend(RemoteConfig(url=valkey.url))
        await backend.put("ab/cd.1.1", b"x")
        await backend.close()

    asyncio.run(work())
    client = valkey.client()
    assert client.get(PREFIX + "ab/cd.1.1") == b"x"
    client.close()


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "unix:///no/such/socket", "s3://bucket/prefix", "file:///dev/null/x"]
)
def test_a_remote_that_is_not_there_is_a_failure_of_ours(url: str) -> None:
    options = {**S3_OPTIONS, "endpoint": "http://127.0.0.1:1"} if url.startswith("s3") else {}

    async def work() -> None:
        backend = make_backend(RemoteConfig(url=url, options=options, timeout_ms=2_000))
        for request in (backend.put("a/b", b"x"), backend.get("a/b"), anext(backend.list())):
            with pytest.raises(RemoteFailure):
                await request
        await backend.close()

    if url.startswith("file"):
        with pytest.raises(ConfigError, match="remote file:///dev/null/x"):
            asyncio.run(work())
    else:
        asyncio.run(work())


@pytest.mark.parametrize(
    ("url", "options", "complaint"),
    [
        ("ftp://host/x", {}, "must begin with one of"),
        ("s3://bucket", {"colour": "red"}, "colour"),
        ("redis://host:port/0", {}, "remote redis://host:port/0"),
    ],
)
def test_settings_that_make_no_sense_are_explained(url: str, options: dict[str, str], complaint: str) -> None:
    config = RemoteConfig(url=url, options=options)
    with pytest.raises(ConfigError, match=complaint):
        config.check()
        make_backend(config)


def test_a_password_is_not_shown() -> None:
    config = RemoteConfig(url="redis://user:secret@host:6379/0?password=secret")
    assert "secret" not in config.public_url and "host:6379" in config.public_url
