"""Route `warnings` and `logging` of libraries: every message to run.log, and each distinct one once to the screen.

Enter it after the heavy imports: libraries install their handlers when imported, and only existing handlers can be
replaced. Everything is restored on leaving.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from surefoot.report.console import Console

_LONGEST = 300  # characters of a message on the screen; run.log has all of it


@contextmanager
def captured_libraries(console: Console) -> Iterator[None]:
    """Send warnings and log records of level WARNING and above to the console."""
    messages = _Messages(console)
    with ExitStack() as stack:
        stack.enter_context(_warnings_to(messages))
        stack.enter_context(_loggers_to(_Handler(messages)))
        stack.callback(messages.count_repeats)
        yield


class _Messages:
    """Print each message once and count its repetitions."""

    def __init__(self, console: Console):
        self._console = console
        self._seen: Counter[str] = Counter()

    def hear(self, source: str, message: str) -> None:
        message = f"{source}: {message.strip()}"
        self._seen[message] += 1
        if self._seen[message] > 1:
            self._console.note(message)
            return
        line = " ".join(message.split())
        if len(line) > _LONGEST:
            self._console.note(message)
            line = f"{line[:_LONGEST]}… (full text in run.log)"
        self._console.say(line, style="yellow")

    def count_repeats(self) -> None:
        for message, count in self._seen.items():
            if count > 1:
                self._console.say(f"{count} times: {' '.join(message.split())[:_LONGEST]}", style="yellow")


class _Handler(logging.Handler):
    def __init__(self, messages: _Messages):
        super().__init__(logging.WARNING)
        self._voice = messages

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._voice.hear(record.name.partition(".")[0], record.getMessage())
        except Exception:  # a library's broken log call must not end a run
            self.handleError(record)


@contextmanager
def _warnings_to(messages: _Messages) -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        messages.hear(category.__name__, str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _loggers_to(handler: logging.Handler) -> Iterator[None]:
    """Replace the handlers of the root logger and of every logger that writes to the screen, except loggers set to a
    level below WARNING (TORCH_LOGS, TRANSFORMERS_VERBOSITY): their user wants the details unchanged."""
    root = logging.getLogger()
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    before = [(logger, logger.handlers[:], logger.propagate) for logger in [root, *named]]
    for logger, handlers, _ in before:
        quiet = [one for one in handlers if not _writes_to_screen(one)]
        detailed = logging.NOTSET < logger.level < logging.WARNING
        if len(quiet) < len(handlers) and not detailed:
            logger.handlers[:], logger.propagate = quiet, True
    root.addHandler(handler)
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers[:], logger.propagate = handlers, propagate


def _writes_to_screen(handler: logging.Handler) -> bool:
    """Whether it is a plain StreamHandler; subclasses write to files or collect. The stream itself says little, since
    it may be a stderr that has been replaced."""
    return type(handler) is logging.StreamHandler
