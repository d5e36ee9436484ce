"""The output of a run: to the screen, and with time stamps to run.log.

A console is live (a terminal: colors, and one display that is redrawn in place) or plain (a pipe, a file, a notebook,
TERM=dumb, NO_COLOR). A plain console prints one line per event, flushed, without escape codes or carriage returns.
`train` prints to stdout; commands whose stdout is data (`--json`) open their console on stderr.

The trade-off: NO_COLOR asks only for no colors, but redrawing needs the same escape codes, so it gets plain lines.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from surefoot.system import durable
from surefoot.system.messages import clean
from surefoot.system.process import TerminalWishes

_LOG_WIDTH = 120  # columns of a table in run.log, and on a stream that has no width of its own
_SILENT = 30.0  # seconds of silence after which a plain console shows that the run is alive
_ASCII = {"·": "|", "…": "...", "–": "-", "—": "-", "→": "->", "≥": ">=", "≤": "<=", "×": "x", "✓": "ok"}
_ASCII |= {"⟦": "[[", "⟧": "]]"}  # marks of the learned part of a data sample


class Console:
    """Prints and logs the output of a run.

    live: redraw in place.
    color: send color codes (a pipe gets them only on request).
    width: columns, None to ask the terminal.
    full: print details that otherwise only run.log gets.
    now: the clock for run.log.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        live: bool = False,
        color: bool = False,
        width: int | None = _LOG_WIDTH,
        full: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ):
        self.live, self.full = live, full
        self._has_width = live or width is None
        self.screen = _Screen(stream, live=live, color=color, width=width)
        self._now = now
        self._log: Path | None = None
        self._unlogged: list[str] = []

    @contextmanager
    def passing(self) -> Iterator[Callable[[str], None]]:
        """Context manager that yields a function showing a transient status line, which replaces the previous one,
        disappears at the end and is not logged. A plain console prints one only after a long silence."""
        if not self.live:
            yield self._now_and_then()
            return
        with Live(console=self.screen, auto_refresh=False, transient=True) as shown:
            self.screen.show_cursor(True)  # a killed process could not restore it
            yield lambda text: shown.update(Text(text, "dim"), refresh=True)

    def _now_and_then(self) -> Callable[[str], None]:
        last = monotonic()

        def show(text: str) -> None:
            nonlocal last
            if monotonic() - last > _SILENT:
                self.screen.print(Text(text, "dim"), soft_wrap=True)
                last = monotonic()

        return show

    @property
    def columns(self) -> int | None:
        """Width for lines that are shortened to fit; None for files and pipes, which have none."""
        return self.screen.width if self._has_width else None

    def say(self, text: str = "", *, style: str = "", logged: str | None = None) -> None:
        """Print text (one line or several) and log it. Long lines are not wrapped.

        logged: text for run.log instead.
        """
        self.screen.print(Text(clean(text), style), soft_wrap=True)
        self.note(text if logged is None else logged)

    def show(self, renderable: Any) -> None:
        """Print a table or another rich renderable; run.log gets it as plain text. In a file or a pipe no line ends
        with blanks."""
        if self.screen.is_terminal:
            self.screen.print(renderable)
        else:
            with self.screen.capture() as caught:
                self.screen.print(renderable)
            if text := _without_end_blanks(caught.get()):
                self.screen.print(Text(text), soft_wrap=True)
        self.note(as_plain_text(renderable))

    def show_summary(self, summary: Any, details: Sequence[Any]) -> None:
        """Print a summary on the screen and log the details; a full console prints the details instead."""
        if not self.full:
            self.screen.print(summary)
        for one in details:
            self.show(one) if self.full else self.note(as_plain_text(one))

    def note(self, text: str) -> None:
        """Write to run.log only. Lines are kept until `log_to` opens it."""
        stamp = self._now().isoformat(timespec="milliseconds")
        lines = [f"{stamp} {line}".rstrip() for line in clean(text).splitlines() or [""]]
        if self._log is None:
            self._unlogged += lines
        else:
            durable.append_lines(self._log, *lines)

    def log_to(self, path: Path) -> None:
        """Append to run.log from now on, starting with the lines so far. Ends a line that was cut short by a kill."""
        self._log = path
        if path.is_file() and path.stat().st_nlink > 1:
            durable.copy_file(path, path)  # do not write into a copy of the folder made by hard links
        if path.exists() and _ends_within_a_line(path):
            durable.append_lines(path, "")
        durable.append_lines(path, *self._unlogged)
        self._unlogged = []


def open_console(stream: TextIO, wishes: TerminalWishes, *, full: bool = False) -> Console:
    """Return the console that suits the stream and the user's settings.

    full: see `Console`.

    Characters that the stream cannot encode are replaced by ASCII: "|" for "·".
    """
    unicode = (stream.encoding or "utf-8").lower().replace("-", "") in {"utf8", "utf16", "utf32"}
    if not unicode and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surefoot.ascii")
    live = stream.isatty() and unicode and not wishes.dumb and not wishes.no_color
    color = live or (wishes.force_color and not wishes.no_color)
    return Console(stream, live=live, color=color, width=None if stream.isatty() else _LOG_WIDTH, full=full)


def as_plain_text(renderable: Any, width: int = _LOG_WIDTH) -> str:
    """Render as text without escape codes or trailing blanks."""
    out = io.StringIO()
    _Screen(out, live=False, color=False, width=width).print(renderable)
    return _without_end_blanks(out.getvalue())


def _without_end_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


class _Screen(rich.console.Console):
    """rich without its markup: a table cell may hold the name of an untrusted file. If the reader goes away (`| head`),
    the run continues and writes only to run.log."""

    def __init__(self, stream: TextIO, *, live: bool, color: bool, width: int | None):
        super().__init__(
            file=stream,
            force_terminal=live or color,
            force_interactive=live,
            color_system="auto" if color else None,
            width=width,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Libraries and Python's exit write to the same file; send their output to the null device instead of failing.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in {b"", b"\n"}


def _ascii_form(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wanted = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in wanted), error.end


codecs.register_error("surefoot.ascii", _ascii_form)


_LEAST = 20  # least columns of text on a narrow terminal


@dataclass(frozen=True)
class Hanging:
    """A renderable. The text may hold line ends of its own; empty lines stay empty."""

    label: Text
    text: Text

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        indent = self.label.cell_len
        width = max(_LEAST, options.max_width - indent)
        lines = [
            line for part in self.text.split("\n", allow_blank=True) for line in part.wrap(console, width) or [part]
        ]
        for number, line in enumerate(lines):
            line.rstrip()
            yield self.label + line if number == 0 else Text(" " * indent if line else "") + line
