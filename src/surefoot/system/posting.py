"""Send JSON requests to a server that the user named, with time limits, retries and one-line faults.

Only the given address is contacted: redirects are not followed and proxies of the environment are not used, so that
texts and weight names go nowhere else. Temporary failures (500, 502, 503, 504, 429, no answer, a broken connection) are
retried; a refusal (400, 404 …) is not.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from surefoot.system.errors import EnvironmentFault, Fault, InputError

_AGAIN = frozenset({429, 500, 502, 503, 504})
_LARGEST = 256 * 2**20  # maximum bytes of an answer
_SHOWN = 160  # characters shown of a server's message


class Hangup:
    """Ends the requests that are under way, and refuses further ones. Called from another thread than theirs."""

    def __init__(self) -> None:
        self.done, self._lock = threading.Event(), threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def __call__(self) -> None:
        with self._lock:
            self.done.set()
            for one in self._sockets:
                _shut(one)

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connection)
            if self.done.is_set():
                _shut(connection)


@dataclass(frozen=True)
class Server:
    """An HTTP server that takes and returns JSON.

    address: http(s)://host[:port][/path].
    timeout: seconds without a byte.
    tries: number of requests in total.
    pause: seconds before the second request, doubled before each further one.
    hangup: gives up all requests.
    """

    address: str
    timeout: float = 120.0
    tries: int = 3
    pause: float = 1.0
    hangup: Hangup = field(default_factory=Hangup, repr=False, compare=False)

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON value of the answer, None if the answer is not JSON. Raises EnvironmentFault (exit 3) if the
        request fails."""
        return _ask(self, path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return _ask(self, path, None)


def server(address: str, key: str, **limits: Any) -> Server:
    """Create a `Server`. Raises InputError, naming `key`, for anything but an http address."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if "@" in address:
        raise InputError(Fault(key, "must not contain a user name or password", "remove them", code="SF-CONFIG-VALUE"))
    if not usable:
        raise InputError(
            Fault(key, f"{address!r} is not an address such as http://127.0.0.1:8000", code="SF-CONFIG-VALUE")
        )
    return Server(address.rstrip("/"), **limits)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _Request(urllib.request.Request):
    """hangup: watches its connection."""

    def __init__(self, url: str, body: bytes | None, hangup: Hangup):
        super().__init__(url, data=body, headers={"Content-Type": "application/json"})
        self.hangup = hangup


class _Http(urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        return super().do_open(partial(_watched, http_class, req.hangup), req, **how)


class _Https(urllib.request.HTTPSHandler):
    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        return super().do_open(partial(_watched, http_class, req.hangup), req, **how)


def _watched(kind: Callable[..., Any], hangup: Hangup, *given: Any, **how: Any) -> Any:
    """Make a connection of this kind whose socket `hangup` ends."""
    connection = kind(*given, **how)
    connect = connection.connect

    def connect_and_watch() -> None:
        connect()
        hangup.watch(connection.sock)

    connection.connect = connect_and_watch
    return connection


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects(), _Http(), _Https())


def _ask(server: Server, path: str, body: bytes | None) -> Any:
    where = server.address + path
    request, given_up = _Request(where, body, server.hangup), server.hangup.done
    trouble = ""
    for turn in range(server.tries):
        if given_up.wait(server.pause * 2 ** (turn - 1) if turn else 0):
            trouble = "was given up, because the run ends"
            break
        try:
            with _OPENER.open(request, timeout=server.timeout) as answer:
                return _value(where, answer.read(_LARGEST + 1))
        except urllib.error.HTTPError as error:
            trouble = _refusal(error)
            # A refusal, such as a wrong model name, would only be repeated.
            if error.code not in _AGAIN:
                break
        except TimeoutError:
            trouble = f"does not answer within {server.timeout:g} s"
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            silent = isinstance(reason, TimeoutError)
            trouble = f"does not answer within {server.timeout:g} s" if silent else f"cannot be reached: {reason}"
    raise EnvironmentFault(Fault(where, trouble, "check that the server runs, and its log", code="SF-SERVER"))


def _value(where: str, answer: bytes) -> Any:
    if len(answer) > _LARGEST:
        raise EnvironmentFault(
            Fault(where, f"answers with more than {_LARGEST // 2**20} MiB", "send fewer at a time", code="SF-SERVER")
        )
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _refusal(error: urllib.error.HTTPError) -> str:
    """The server's error message in one line."""
    try:
        said = " ".join(error.read(4096).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException):
        said = ""
    return f"answers {error.code}" + (f": {said[:_SHOWN]}" if said else "")
