"""Exchange JSON messages with a server over a WebSocket (RFC 6455), one question at a time.

    socket = WebSocket(server("http://127.0.0.1:8000", key), "/ws")
    answer = socket.ask({"type": "reset", "data": {}})

As in `surefoot.system.posting`, only the given address is contacted. A failure is an EnvironmentFault with one line.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.posting import Server

_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_LARGEST = 64 * 2**20  # maximum bytes of a message


class WebSocket:
    """An open connection. Raises EnvironmentFault if there is no such server.

    server: its address and timeout; there are no retries, since a message may have had an effect.
    """

    def __init__(self, server: Server, path: str):
        self._where = server.address + path
        parts = urlsplit(self._where)
        secure = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        with self._faults():
            self._socket = socket.create_connection((host, port), timeout=server.timeout)
            try:
                if secure:
                    self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
                self._file = self._socket.makefile("rb")
                self._shake_hands(parts.netloc, parts.path)
            except BaseException:
                self._socket.close()
                raise

    def ask(self, message: Any) -> Any:
        """Send a message and return the next one. Raises EnvironmentFault if the server is gone or answers no JSON."""
        with self._faults():
            self._send(_TEXT, json.dumps(message).encode())
            return json.loads(self._receive())

    def close(self) -> None:
        with self._socket, self._faults():
            self._send(_CLOSE, struct.pack(">H", 1000))

    def _shake_hands(self, host: str, path: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall("\r\n".join((*lines, "", "")).encode())
        status = self._file.readline(4096).split(maxsplit=2)
        headers = http.client.parse_headers(self._file)
        if status[1:2] != [b"101"]:
            raise ValueError(f"opens no WebSocket: it answers {b' '.join(status[1:]).decode(errors='replace').strip()}")
        wanted = base64.b64encode(hashlib.sha1((key + _MAGIC).encode()).digest()).decode()
        if headers.get("Sec-WebSocket-Accept") != wanted:
            raise ValueError("opens no WebSocket: its handshake is wrong")

    def _send(self, kind: int, content: bytes) -> None:
        """Send a message in one frame; a client's are masked."""
        mask = os.urandom(4)
        size = len(content)
        if size < 126:
            head = struct.pack(">BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | kind, 0x80 | 127, size)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(content))
        self._socket.sendall(head + mask + masked)

    def _receive(self) -> bytes:
        """Return the next message, answering pings."""
        message = b""
        while True:
            first, second = self._read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read(8))
            if len(message) + size > _LARGEST:
                raise ValueError(f"answers with more than {_LARGEST // 2**20} MiB")
            content, kind = self._read(size), first & 0x0F
            if kind == _PING:
                self._send(_PONG, content)
            elif kind == _CLOSE:
                raise ValueError(f"closes the connection {content[2:].decode(errors='replace')}".strip())
            elif kind in (_CONTINUED, _TEXT, _BINARY):
                message += content
                if first & 0x80:
                    return message

    def _read(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise ValueError("closes the connection")
        return found

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            trouble = "does not answer in time"
        except json.JSONDecodeError:
            trouble = "answers with something that is not JSON"
        except (ValueError, http.client.HTTPException) as error:
            trouble = str(error)
        except OSError as error:
            trouble = f"cannot be reached: {error.strerror or error}"
        else:
            return
        raise EnvironmentFault(Fault(self._where, trouble, "check that the server runs, and its log", code="SF-SERVER"))
