"""A local OpenEnv server: /schema over HTTP and sessions over the WebSocket /ws, following its protocol."""

import base64
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = {
    "action": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]},
    "observation": {
        "properties": {"prompt": {"type": "string"}, "left": {"type": "integer"}, "done": {}, "reward": {}}
    },
    "state": {"properties": {}},
}
Answer = Callable[[dict[str, Any], dict[str, Any]], Any]  # what the session knows, the message -> what is sent


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/ws":
            self.server.asked.append(self.path)  # type: ignore[attr-defined]
            raw = json.dumps(self.server.schema).encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
            return
        session: dict[str, Any] = {}
        self.server.sessions.append(session)  # type: ignore[attr-defined]  # before the client goes on
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while (message := self._receive()) is not None:
            said = self.server.answer(session, message)  # type: ignore[attr-defined]
            if said is None:  # it dies
                return
            self._send(9, b"are you there")
            raw = said if isinstance(said, bytes) else json.dumps(said).encode()
            half = len(raw) // 2
            self._send(1, raw[:half], last=False)  # in two frames
            self._send(0, raw[half:])

    def _send(self, kind: int, content: bytes, *, last: bool = True) -> None:
        head, size = 0x80 * last | kind, len(content)
        self.wfile.write(struct.pack(">BB", head, size) if size < 126 else struct.pack(">BBH", head, 126, size))
        self.wfile.write(content)

    def _receive(self) -> dict[str, Any] | None:
        while len(head := self.rfile.read(2)) == 2:
            kind, size = head[0] & 0x0F, head[1] & 0x7F
            assert head[1] & 0x80, "a client masks what it sends"
            if size == 126:
                (size,) = struct.unpack(">H", self.rfile.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            content = bytes(byte ^ mask[place % 4] for place, byte in enumerate(self.rfile.read(size)))
            if kind == 8:
                return None
            if kind == 1:
                return json.loads(content)
            assert (kind, content) == (10, b"are you there")
        return None

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    schema: dict[str, Any]
    answer: Answer
    sessions: list[dict[str, Any]]
    asked: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def openenv(answer: Answer, schema: dict[str, Any] = SCHEMA) -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.schema, server.answer, server.sessions, server.asked = schema, staticmethod(answer), [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def observed(reward: float | None, done: bool, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def guessing(session: dict[str, Any], message: dict[str, Any]) -> Any:
    """Return an environment of three turns; the reward is the length of each answer, as a share of 100."""
    if message["type"] == "reset":
        session |= {"left": 3, "record": message["data"]}
        return observed(None, False, prompt="", left=3)
    session["left"] -= 1
    text = message["data"]["message"]
    return observed(
        len(text) / 100, session["left"] == 0, prompt=f"{session['left']} left " + "é" * 100, left=session["left"]
    )
