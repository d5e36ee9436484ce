"""Ask a server that the user named: JSON there and back, with time limits, retries and one-line faults.

Only the address given is asked: redirects are not followed and proxies of the environment are not used, so that texts
and weights' names go nowhere else. An answer that is no answer (500, 502, 503, 504, 429, silence, a broken
connection) is asked for again; a refusal (400, 404 …) is not.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from surefoot.system.errors import EnvironmentFault, Fault, InputError

_AGAIN = frozenset({429, 500, 502, 503, 504})
_LARGEST = 256 * 2**20  # bytes of an answer
_SHOWN = 160  # characters of what a server said


@dataclass(frozen=True)
class Server:
    """An HTTP server that takes and answers JSON.

    address: http(s)://host[:port][/path].
    timeout: seconds without a byte.
    tries: requests in all.
    pause: seconds before the second one, doubled before each further one.
    """

    address: str
    timeout: float = 120.0
    tries: int = 3
    pause: float = 1.0

    def post(self, path: str, body: Any) -> Any:
        """The JSON value that the server answers; None where it answers with no JSON at all. Raises EnvironmentFault
        (exit 3) where it cannot be had."""
        return _ask(self, path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return _ask(self, path, None)


def server(address: str, key: str, **limits: Any) -> Server:
    """Raises InputError, naming `key`, for anything that is no http address."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if "@" in address:
        raise InputError(
            Fault(
                key, "an address with a user or password in it is not asked", "leave them out", code="SF-CONFIG-VALUE"
            )
        )
    if not usable:
        raise InputError(
            Fault(key, f"{address!r} is not an address such as http://127.0.0.1:8000", code="SF-CONFIG-VALUE")
        )
    return Server(address.rstrip("/"), **limits)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def _ask(server: Server, path: str, body: bytes | None) -> Any:
    where = server.address + path
    request = urllib.request.Request(where, data=body, headers={"Content-Type": "application/json"})
    trouble = ""
    for turn in range(server.tries):
        if turn:
            time.sleep(server.pause * 2 ** (turn - 1))
        try:
            with _OPENER.open(request, timeout=server.timeout) as answer:
                return _value(where, answer.read(_LARGEST + 1))
        except urllib.error.HTTPError as error:
            trouble = _refusal(error)
            # A refusal (a wrong model name, say) comes again however often it is asked.
            if error.code not in _AGAIN:
                break
        except TimeoutError:
            trouble = f"does not answer within {server.timeout:g} s"
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            silent = isinstance(reason, TimeoutError)
            trouble = f"does not answer within {server.timeout:g} s" if silent else f"cannot be reached: {reason}"
    raise EnvironmentFault(Fault(where, trouble, "see that the server runs and what its log says", code="SF-SERVER"))


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
    """What the server says of it, in one line."""
    try:
        said = " ".join(error.read(4096).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException):
        said = ""
    return f"answers {error.code}" + (f": {said[:_SHOWN]}" if said else "")
