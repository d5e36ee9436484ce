"""`surefoot board`: a live, read-only page of the runs in a folder, for users of this machine who have the key.

It listens only on the loopback interface. A request is answered if all of these hold: its Host is this machine and this
port (a foreign page whose DNS name points here has another name, another local server another port); its Origin, if
any, is this server; its method is GET; it carries this session's key, once in the printed address and then in a cookie.
Request paths are compared with the few known ones and with the ids of the listing; none reaches the file system.

The trade-off: one thread per open page, and polling the files twice a second. That is enough for the users of one
machine, and needs only Python's standard library.

A page is kept current by server-sent events: the pieces of HTML that changed, and the curves. Such a stream is an
endless iterator of messages, None if nothing changed since the last check. It begins with everything, so a reconnecting
browser needs no state.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import signal
import socketserver
import sys
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click

from surefoot.commands.board.listing import Overview, Run, list_runs, signature, status_now
from surefoot.commands.terminal import echo
from surefoot.report.html import curve_values, live_values, part, policy, render, report_page
from surefoot.report.record import read_run
from surefoot.system.errors import EnvironmentFault, Fault


@click.command()
@click.argument("runs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on.  [default: a free one]")
@click.option("--open", "open_page", is_flag=True, help="Open the page in your browser.")
def board(runs: Path, port: int, open_page: bool) -> None:
    """Show the runs in RUNS and its subfolders, running and ended ones, on a page that updates itself.

    The page is served only to this machine, to users who have the printed address, and changes nothing. Ctrl-C ends it.
    To
    open it on another machine: ssh -L PORT:127.0.0.1:PORT this-machine.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes `board RUNS &` ignore SIGINT
    try:
        with Board(runs, port) as server:
            count = len(list_runs(runs))
            echo(f"{count} {'run' if count == 1 else 'runs'} in {runs}; Ctrl-C ends this page, not the runs")
            echo(server.address)
            if open_page:
                webbrowser.open(server.address)
            server.serve_forever()
    except KeyboardInterrupt:
        echo()


ADDRESS = "127.0.0.1"
_SELF = "'self'"  # pages may fetch the streams of this server
_NAMES = frozenset({ADDRESS, "localhost"})
_RUN = re.compile(r"/run/([0-9a-f]{12})(/events)?")
_LOOK = 0.5  # seconds between two checks of the files
_BEAT = 15.0  # seconds of silence after which a comment is sent, to detect closed connections
_SLOW = 30.0  # seconds after which an inactive client is dropped


class Board(ThreadingHTTPServer):
    """The HTTP server. root: the folder of runs. port: 0 for a free one. look, beat: seconds, see above."""

    # The thread of an open page never ends by itself; Ctrl-C must not wait for it.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # beyond socketserver's 5 a browser's connection is tried again after a second

    def __init__(self, root: Path, port: int = 0, *, look: float = _LOOK, beat: float = _BEAT):
        self.root, self.look, self.beat = root, look, beat
        self.token = secrets.token_urlsafe(32)
        self.closing = threading.Event()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            fault = Fault(
                f"port {port}", f"cannot be used: {error}", "leave --port out to get a free one", code="SF-USE-FLAG"
            )
            raise EnvironmentFault(fault) from None

    def server_bind(self) -> None:
        """Bind without resolving this machine's name, which may ask the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def address(self) -> str:
        """The address to open, including the key."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The cookie's name includes the port, because browsers share cookies between ports of a machine."""
        return f"surefoot_{self.server_port}"

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect during an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Board  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "surefoot", ""
    timeout = _SLOW

    def do_GET(self) -> None:
        if not self._is_for_us():
            return self._say(403, "This server answers only requests from this machine.")
        url = urlsplit(self.path)
        if url.path == "/" and url.query:
            return self._let_in(url.query)
        if not self._has_key():
            return self._say(403, "Open the address that `surefoot board` printed; it contains the key.")
        return self._answer(url.path)

    def _refuse(self) -> None:
        self._say(405, "Only GET is allowed: this page is read-only.", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _is_for_us(self) -> bool:
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or len(origins) > 1:
            return False
        if hosts[0] not in {f"{name}:{self.server.server_port}" for name in _NAMES}:
            return False
        return not origins or origins[0] == f"http://{hosts[0]}"

    def _let_in(self, query: str) -> None:
        given = parse_qs(query).get("token", [""])[0]
        if not self._is_key(given):
            return self._say(403, "This address has the key of another `surefoot board` session.")
        cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        return self._say(303, "", Location="/", **{"Set-Cookie": cookie})

    def _has_key(self) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.server.cookie in cookies and self._is_key(cookies[self.server.cookie].value)

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.server.token.encode())

    def _answer(self, path: str) -> None:
        if path == "/":
            return self._page(_overview_page(self.server.root))
        if path == "/events":
            return self._stream(follow_all(self.server.root))
        found = _RUN.fullmatch(path)
        run = _find(self.server.root, found[1]) if found else None
        if found is None or run is None:
            return self._say(404, "No such page, or the run was removed.")
        if found[2]:
            return self._stream(follow_run(run.folder))
        return self._page(_run_page(run))

    def _page(self, html: str) -> None:
        self._send(200, "text/html; charset=utf-8", html.encode())

    def _say(self, code: int, text: str, **headers: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{text}\n".encode(), **headers)

    def _send(self, code: int, kind: str, body: bytes, **headers: str) -> None:
        self._head(code, kind, **{"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, messages: Iterator[Message | None]) -> None:
        """Send messages until the browser disconnects or the server ends."""
        self._head(200, "text/event-stream; charset=utf-8")
        silent = 0.0
        for message in messages:
            if message is not None:
                self.wfile.write(message.encode())
                silent = 0.0
                continue
            if silent >= self.server.beat:
                self.wfile.write(b": still here\n\n")
                silent = 0.0
            if self.server.closing.wait(self.server.look):
                return
            silent += self.server.look

    def _head(self, code: int, kind: str, **headers: str) -> None:
        self.send_response(code)
        always = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy(_SELF)}; frame-ancestors 'none'",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in {**always, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: requests contain the key, and the screen belongs to the user."""


def _find(root: Path, id: str) -> Run | None:
    return next((run for run in list_runs(root) if run.id == id), None)


def _overview_page(root: Path) -> str:
    glances = Overview(root).glances()
    values = {"title": "Runs", "root": root.name or str(root), "runs": glances, "live": "/events"}
    return render("board.html", values, connect=_SELF)


def _run_page(run: Run) -> str:
    record = read_run(run.folder)
    return report_page(record, status_now(run.folder, record.events), live=f"/run/{run.id}/events", back="/")


_PARTS = {"head": "part_head.html", "event-list": "part_events.html", "sample-list": "part_samples.html"}


@dataclass(frozen=True)
class Message:
    """A server-sent event. event: the name that the page's script listens for."""

    event: str
    data: Any

    def encode(self) -> bytes:
        """Encode as an event; JSON contains no line end, so the data are one line."""
        return f"event: {self.event}\ndata: {json.dumps(self.data, allow_nan=False)}\n\n".encode()


def follow_run(run: Path) -> Iterator[Message | None]:
    """Yield the parts of one run's page whenever a file changed or its process ended."""
    shown: dict[str, str] = {}
    before: object = None
    while True:
        now = signature(run)
        if now != before:
            before, record = now, read_run(run)
            values = live_values(record, status_now(run, record.events))
            parts = {name: part(template, values) for name, template in _PARTS.items()}
            if new := {name: text for name, text in parts.items() if shown.get(name) != text}:
                shown = parts
                yield Message("parts", new)
            yield Message("curves", curve_values(record))
        yield None


def follow_all(root: Path) -> Iterator[Message | None]:
    """Yield the whole overview whenever one of its rows changed."""
    overview, sent = Overview(root), None
    while True:
        html = part("part_runs.html", {"runs": overview.glances()})
        if html != sent:
            sent = html
            yield Message("parts", {"runs": html})
        yield None
