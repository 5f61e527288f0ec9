"""What an engine must be able to do to be verified, and the HTTP both engines' forms of it share."""

import http.client
import json
import time
import urllib.parse
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from kvcore.verify.verdict import Answer


class VerifyError(Exception):
    """The question could not be put to the engine. `advice`: what to do about it."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class HttpJson:
    """JSON over HTTP/1.1 to one server. Blocking, one connection a request; not for use in an event loop."""

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        """`key` goes out as a bearer token, if there is one. VerifyError for a URL that is none."""
        url = urllib.parse.urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        try:
            self._host, self._port = url.hostname or "", url.port
        except ValueError:
            self._host, self._port = "", None
        if url.scheme not in ("http", "https") or not self._host:
            raise VerifyError(f"{base_url!r} is no http(s) URL", "give it as http://HOST:PORT")
        self._tls = url.scheme == "https"
        self._prefix = url.path.rstrip("/")
        self.base_url = urllib.parse.urlunsplit((url.scheme, url.netloc, self._prefix, "", ""))
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text. VerifyError when no answer comes."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except TimeoutError as error:
            raise VerifyError(
                f"{self.base_url} did not answer {path} within {self._timeout_s:g} s",
                "wait until it has less to do, or allow more with --timeout-s",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise VerifyError(
                f"no answer from {self.base_url}: {str(error) or type(error).__name__}",
                "is the engine's HTTP server running there, and is it http or https?",
            ) from error
        finally:
            connection.close()

    def ask_json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's body. VerifyError for anything but status 200 with JSON."""
        status, text = self.ask(method, path, body)
        if status in (401, 403):
            raise VerifyError(f"{self.base_url} refused {path}: {status}", "give its key with --api-key")
        if status != 200:
            raise VerifyError(
                f"{self.base_url} answered {path} with {status}: {text[:300]}",
                "is it the right kind of engine, and the right URL?",
            )
        try:
            return json.loads(text)
        except ValueError as error:
            raise VerifyError(
                f"{self.base_url} answered {path} with something other than JSON: {text[:80]!r}",
                "is it the right kind of engine, and the right URL?",
            ) from error


class Engine(ABC):
    """One engine under test. Every method may raise VerifyError."""

    hints: ClassVar[dict[str, list[str]]]
    """By the code of a verdict: what usually causes it with this engine."""

    def __init__(self, http: HttpJson) -> None:
        self.http = http

    @abstractmethod
    def describe(self) -> str:
        """Kind, version and model. Fails for a server that is no such engine, or has no store configured."""

    @abstractmethod
    def ask_greedy(self, prompt: str, max_tokens: int) -> Answer:
        """Greedy continuation of exactly `max_tokens` tokens; `seconds` may be 0."""

    @abstractmethod
    def flush(self) -> bool:
        """Empties the engine's own caches, and not the store. False when it is too busy for that now."""

    @abstractmethod
    def model(self) -> str:
        """The model's name for /tokenize."""

    def answer(self, prompt: str, max_tokens: int) -> Answer:
        start = time.monotonic()
        answer = self.ask_greedy(prompt, max_tokens)
        return msgspec.structs.replace(answer, seconds=time.monotonic() - start)

    def count_tokens(self, text: str) -> int | None:
        """None when the engine has no /tokenize."""
        status, body = self.http.ask("POST", "/tokenize", {"model": self.model(), "prompt": text})
        try:
            return int(json.loads(body)["count"]) if status == 200 else None
        except (ValueError, KeyError, TypeError):
            return None
