"""Terminal output of commands: text and JSON on stdout, the console, and errors on stderr.

One line per fault, in the style of compilers; a fault in a text file shows its line and a caret:

    run.yaml:7:1: error: learning_rte: unknown key; did you mean optim.lr? (key lr under optim) [SF-CONFIG-KEY]
      7 | learning_rte: 1e-4
        | ^^^^^^^^^^^^

The code in brackets names the kind of fault: `surefoot explain SF-CONFIG-KEY`.

Exit codes: 0 done, 1 a bug in surefoot, 2 the user's input, 3 the environment, 4 no checkpoint that verifies,
5 diverged, 6 a replay that does not reproduce the failure, 75 stopped early and resumable, 130 interrupted. Codes 2 to
5 are defined by the classes in `surefoot.system.errors`.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.system.errors import Fault, SurefootError
from surefoot.system.messages import clean, shown_json
from surefoot.system.redaction import veiled, veiled_line

if TYPE_CHECKING:
    from surefoot.report.console import Console

BUG_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
EXCERPT_WIDTH = 100  # characters of a source line that are shown
_NEAR = 1000  # characters before the excerpt searched for the name of a secret; a line may have megabytes

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:(?P<column>\d+))?")
_WORD = re.compile(r"""'[^']*'|"[^"]*"|[^\s,:\[\]{}]+""")


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text without terminal escape sequences, since it may contain names from untrusted files."""
    click.echo(clean(str(text)), err=err, nl=nl)


def echo_json(value: Any, indent: int | None = 2, **settings: Any) -> None:
    """Print JSON to stdout. settings: keyword arguments of `json.dumps`."""
    click.echo(shown_json(value, indent, **settings))


def screen(*, err: bool = False) -> Console:
    """Return the console on stdout, or on stderr (err) for commands that print answers or JSON on stdout."""
    from surefoot.report.console import open_console
    from surefoot.system import process

    return open_console(sys.stderr if err else sys.stdout, process.terminal_wishes())


@dataclass
class Invocation:
    """State of one command-line call, used in its messages.

    debug: print tracebacks.
    typed: the words after `surefoot`; also set when a compat script supplied them.
    locate: adds the place in the config file to a fault that names only a key.
    """

    debug: bool = False
    typed: tuple[str, ...] = ()
    locate: Callable[[Fault], Fault] = lambda fault: fault


def report_error(error: SurefootError, invocation: Invocation) -> None:
    """Print one line per fault, with an excerpt if the fault names a line and column of a file."""
    if invocation.debug:
        _print_traceback(error)
    for fault in error.faults:
        click.echo("\n".join(fault_lines(invocation.locate(fault))), err=True)
    for note in getattr(error, "__notes__", ()):
        click.echo(note, err=True)


def report_usage(error: click.ClickException, invocation: Invocation) -> None:
    """Print a wrong flag or command in one line, with the help page to read."""
    message = error.format_message()
    if override := _meant_as_override(error, invocation.typed):
        message = f"no such option {override[0]!r}; config keys are written without dashes: {override[1]}"
    message = _one_line(message)
    message = message[:1].lower() + message[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        end = "" if message.endswith((".", "?")) else "."
        message = f"{message}{end} See `{error.ctx.command_path} --help`."
    click.echo(f"error: {message}", err=True)


def _meant_as_override(error: click.ClickException, typed: Sequence[str]) -> tuple[str, str] | None:
    """Detect a config key written as a flag (`--optim.lr=1e-4`, `--optim.lr 1e-4`); return the flag and the fix."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    if not any(parameter.name == "overrides" for parameter in error.ctx.command.params):
        return None
    from surefoot.config.keys import all_keys

    flag, key = error.option_name, error.option_name.lstrip("-")
    place = next((at for at, word in enumerate(typed) if word.partition("=")[0] == flag), None)
    if key not in all_keys() or place is None:
        return None
    _, equals, value = typed[place].partition("=")
    following = "" if equals else next(iter(typed[place + 1 : place + 2]), "")
    return flag, f"{key}={value or following or '…'}"


def report_bug(error: BaseException, invocation: Invocation) -> None:
    """Print an unexpected error in one line; the traceback only with --debug."""
    if invocation.debug:
        _print_traceback(error)
    advice = "" if invocation.debug else " (run again with --debug)"
    click.echo(f"internal error: {type(error).__name__}: {_one_line(str(error))}{advice}", err=True)


def _print_traceback(error: BaseException) -> None:
    echo("".join(map(veiled, traceback.format_exception(error))), err=True, nl=False)


def fault_lines(fault: Fault) -> list[str]:
    """The message, followed by the excerpt if there is one."""
    place, code = _PLACE.fullmatch(fault.where), f" [{fault.code}]" if fault.code else ""
    if place is None:
        return [f"error: {_one_line(str(fault))}{code}"]
    message = _one_line(str(replace(fault, where="")))
    lines = [f"{veiled(fault.where)}: error: {message}{code}"]
    if place["column"]:
        lines += _excerpt(Path(place["file"]), int(place["line"]), int(place["column"]))
    return lines


def _excerpt(path: Path, line: int, column: int) -> list[str]:
    """The source line with a caret under the word at `column`; empty if the file or line cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            text = next(islice(file, line - 1, None), "")
    except OSError:
        return []
    start = max(0, column - 1 - EXCERPT_WIDTH // 2)
    before = max(0, start - _NEAR)
    text = _printable(text[before : start + EXCERPT_WIDTH].rstrip("\r\n"))
    text = veiled_line(text)[start - before :]
    if not text.strip():
        return []
    offset = column - 1 - start
    word = _WORD.match(text, offset)
    carets = "^" * (len(word[0]) if word else 1)
    margin = " " * len(str(line))
    return [f"  {line} | {text}", f"  {margin} | {' ' * offset}{carets}"]


def _one_line(text: str) -> str:
    return _printable(" ".join(veiled(text).split()))


def _printable(text: str) -> str:
    """Replace tabs and control characters by spaces: carets stay aligned, and files cannot send terminal codes."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
