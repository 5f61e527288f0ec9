"""An HTTP server on 127.0.0.1 whose answers a test writes down."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Route = Callable[[Any], tuple[int, Any]]


class CannedServer:
    """`routes`: (method, path) -> what makes (status, body) of the body; may be changed while it runs.
    `asked` lists (path, body, authorization) in order."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Route] = {}
        self.asked: list[tuple[str, Any, str | None]] = []
        self.url = ""

    def answer(self, method: str, path: str, body: str | None, authorization: str | None) -> tuple[int, str]:
        content = json.loads(body) if body else None
        self.asked.append((path, content, authorization))
        route = self.routes.get((method, path))
        if route is None:
            return 404, "Not Found"
        status, answer = route(content)
        return status, answer if isinstance(answer, str) else json.dumps(answer)


@contextmanager
def canned_server() -> Iterator[CannedServer]:
    canned = CannedServer()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length).decode() if length else None
            status, text = canned.answer(self.command, self.path, body, self.headers.get("Authorization"))
            raw = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    canned.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield canned
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
