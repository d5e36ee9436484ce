"""What a search has measured so far, in a file, so that one that is broken off goes on where it was.

The search is the same whenever its answers are, so their order is all of its state: a search that is started again
gets them back one after the other for as long as it asks what was asked, and measures from there on. The file goes when
the search is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from surefoot.commands.tune.attempt import Answer, Request
from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, InputError

_FORMAT = 1
_ANSWER = TypeAdapter(Answer)


class Journal:
    """One line for what the search is about, then one for each trial. path: None keeps nothing."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]):
        """about: all that answers depend on besides the requests, JSON-able. A file about anything else is replaced."""
        self._path = path
        self._head = json.dumps({"format": _FORMAT, "about": _digest(about)})
        self._known = _read(path, self._head) if path is not None else []
        self._next = 0

    @property
    def known(self) -> int:
        """Answers that are still to be given back."""
        return len(self._known) - self._next

    def answer(self, request: Request, measure: Callable[[], Answer]) -> Answer:
        """The kept answer where it is the next one's, else what `measure` returns. What a trial is held against, and
        for how long, follows from what was asked before, and is not asked for again."""
        asked = _digest({"config": request.config, "steps": request.steps, "rounds": request.rounds})
        if self._next < len(self._known):
            if self._known[self._next][0] == asked:
                self._next += 1
                return self._known[self._next - 1][1]
            self._known = self._known[: self._next]
        answer = measure()
        if self._path is not None:
            self._add(asked, answer)
        return answer

    def finish(self) -> None:
        if self._path is not None:
            durable.remove(self._path)

    def _add(self, asked: str, answer: Answer) -> None:
        assert self._path is not None
        self._known.append((asked, answer))
        self._next += 1
        lines = [json.dumps({"asked": one, "answer": asdict(said)}) for one, said in self._known]
        durable.write_text(self._path, "".join(f"{line}\n" for line in [self._head, *lines]))


def require_own_journal(path: Path) -> None:
    """Raises InputError where another file is in the place of one, which a search would replace and remove."""
    try:
        own = not os.path.lexists(path) or "about" in json.loads(plain_files.read_text(path).partition("\n")[0])
    except (OSError, ValueError, TypeError, RecursionError):
        own = False
    if not own:
        raise InputError(
            Fault(str(path), "was not written by surefoot", "move it away, or name another --out", code="SF-USE-OUTPUT")
        )


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path, head: str) -> list[tuple[str, Answer]]:
    """Nothing from a file that is damaged or about another search."""
    try:
        first, *lines = plain_files.read_text(path).splitlines()
        if first != head:
            return []
        found = [json.loads(line) for line in lines]
        return [(one["asked"], _ANSWER.validate_python(one["answer"])) for one in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return []
