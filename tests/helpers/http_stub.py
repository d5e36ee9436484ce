"""A local server that answers JSON as a test specifies, including wrong, late or missing answers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status, and a JSON value or text


@dataclass
class Stub:
    """The server.

    reply: (path, body of a request) -> the answer.
    asked: the requests received.
    delay: seconds before each answer.
    redirect: address that requests are redirected to.
    """

    reply: Callable[[str, Any], Reply]
    address: str = ""
    delay: float = 0.0
    redirect: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        stub: Stub = self.server.stub  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        said = json.loads(body) if body else None
        stub.asked.append((self.path, said))
        time.sleep(stub.delay)
        status, answer = (302, "") if stub.redirect else stub.reply(self.path, said)
        raw = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        if stub.redirect:
            self.send_header("Location", stub.redirect)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        stub: Stub = self.server.stub  # type: ignore[attr-defined]
        stub.asked.append((self.path, None))
        status, answer = stub.reply(self.path, None)
        raw = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # beyond socketserver's 5 a connection is tried again after a second

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that gave up; some tests do that on purpose."""


@contextmanager
def answering(reply: Callable[[str, Any], Reply]) -> Iterator[Stub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    stub = server.stub = Stub(reply, f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
