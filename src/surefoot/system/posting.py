"""Send JSON requests to a server that the user named, with time limits, retries and one-line faults.

Only the given address is contacted: redirects are not followed and proxies of the environment are not used, so that
texts and weight names go nowhere else. Temporary failures (500, 502, 503, 504, 429, no answer, a broken connection) are
retried; a refusal (400, 404 …) is not. Other threads can see how long a server has been silent, and give up its
requests (`Requests`).
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from surefoot.system.errors import EnvironmentFault, Fault, InputError

_AGAIN = frozenset({429, 500, 502, 503, 504})
_LARGEST = 256 * 2**20  # maximum bytes of an answer
_SHOWN = 160  # characters shown of a server's message


class GivenUp(EnvironmentFault):
    """A request that `Requests.give_up` has ended or refused."""


class Requests:
    """The requests to a server that are under way.

    given_up: whether they were, and no others are sent.
    """

    def __init__(self) -> None:
        self.given_up, self._lock = threading.Event(), threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._count, self._heard = 0, 0.0

    def give_up(self) -> None:
        """End them, and refuse further ones. For another thread than theirs."""
        with self._lock:
            self.given_up.set()
            for one in self._sockets:
                _shut(one)

    @property
    def silence(self) -> tuple[int, float]:
        """How many there are, and for how many seconds the server has answered none of them."""
        with self._lock:
            return self._count, time.monotonic() - self._heard if self._count else 0.0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self._heard = self._heard if self._count else time.monotonic()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def heard(self) -> None:
        """Note that the server has answered."""
        with self._lock:
            self._heard = time.monotonic()

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connection)
            if self.given_up.is_set():
                _shut(connection)


@dataclass(frozen=True)
class Server:
    """An HTTP server that takes and returns JSON.

    address: http(s)://host[:port][/path].
    timeout: seconds without a byte.
    tries: number of requests in total.
    pause: seconds before the second request, doubled before each further one.
    requests: those under way.
    """

    address: str
    timeout: float = 120.0
    tries: int = 3
    pause: float = 1.0
    requests: Requests = field(default_factory=Requests, repr=False, compare=False)

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON value of the answer, None if the answer is not JSON. Raises EnvironmentFault (exit 3) if the
        request fails."""
        return _ask(self, path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return _ask(self, path, None)

    @contextmanager
    def at_once(self, most: int) -> Iterator[ThreadPoolExecutor]:
        """Yield threads for this many requests at once. An error in the block, or Ctrl-C, gives up all of them: the end
        of the block waits for its threads."""
        with ThreadPoolExecutor(most) as pool:
            try:
                yield pool
            except BaseException:
                self.requests.give_up()
                raise


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
    """requests: to which it belongs."""

    def __init__(self, url: str, body: bytes | None, requests: Requests):
        super().__init__(url, data=body, headers={"Content-Type": "application/json"})
        self.requests = requests


class _Http(urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        return super().do_open(partial(_watched, http_class, req.requests), req, **how)


class _Https(urllib.request.HTTPSHandler):
    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        return super().do_open(partial(_watched, http_class, req.requests), req, **how)


def _watched(kind: Callable[..., Any], requests: Requests, *given: Any, **how: Any) -> Any:
    """Make a connection of this kind whose socket can be given up."""
    connection = kind(*given, **how)
    connect = connection.connect

    def connect_and_watch() -> None:
        connect()
        requests.watch(connection.sock)

    connection.connect = connect_and_watch
    return connection


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects(), _Http(), _Https())


def _ask(server: Server, path: str, body: bytes | None) -> Any:
    where, requests = server.address + path, server.requests
    request = _Request(where, body, requests)
    trouble = ""
    for turn in range(server.tries):
        if requests.given_up.wait(server.pause * 2 ** (turn - 1) if turn else 0):
            break
        try:
            with requests.one_more(), _OPENER.open(request, timeout=server.timeout) as answer:
                content = answer.read(_LARGEST + 1)
                if answer.length and len(content) <= _LARGEST:  # `read` does not tell that a connection was cut
                    raise http.client.IncompleteRead(content, answer.length)
                requests.heard()
                return _value(where, content)
        except urllib.error.HTTPError as error:
            requests.heard()
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
    if requests.given_up.is_set():
        raise GivenUp(Fault(where, "was given up, because the run ends", code="SF-SERVER"))
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
