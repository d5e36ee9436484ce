"""Trials in other processes, and the file of their answers.

    with workshop(forks=True) as shop:
        answer = shop.attempt(Request(config, steps=4, rounds=2), limit=60)

A search is the same whenever its answers are, so their order is all of its state: `Journal` keeps them, and a search
that is started again gets them back for as long as it makes the same requests, and measures from there on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from surefoot.runs.trial import Clock, Rival, Trial
from surefoot.system import durable, plain_files
from surefoot.system.errors import NO_MEMORY, Fault, InputError
from surefoot.system.redaction import veiled

NOT_DONE = "NOT-DONE"  # the code of an answer that took too long
_TRIAL = TypeAdapter(Trial)
_OUT_OF_MEMORY = (-signal.SIGKILL, 128 + signal.SIGKILL)  # how the kernel ends a process that takes too much
_TAIL = 4096  # bytes of what a trial printed that are looked at


@dataclass(frozen=True)
class Request:
    """config: plain values. steps: timed ones, `rounds` times over. rival, clock: see `run_trial`."""

    config: Mapping[str, Any]
    steps: int
    rounds: int
    rival: Rival | None = None
    clock: Clock = "wall"


@dataclass(frozen=True)
class Answer:
    """trial: None where there is none; then failure says why. whole: seconds that it took, the start included. code: of
    the fault, see `Fault`, or NOT_DONE."""

    trial: Trial | None
    failure: str = ""
    whole: float = 0.0
    code: str = ""


def can_fork(device: str) -> bool:
    """Whether trials on this kind of device may be copies of one process. What a GPU's driver holds is not copied, and
    on other systems than Linux libraries do not stand it."""
    return device == "cpu" and sys.platform.startswith("linux")


@contextmanager
def workshop(*, forks: bool) -> Iterator[Workshop]:
    """forks: whether every trial is a copy of one process, see `can_fork`; else each is another one. No trial outlives
    the block."""
    with tempfile.TemporaryFile() as printed:
        shop = Workshop(printed, forks=forks)
        try:
            yield shop
        finally:
            shop.end()


class Workshop:
    """The process that takes the trials, or starts them, from the first one on."""

    def __init__(self, printed: IO[bytes], *, forks: bool):
        """printed: takes what trials and libraries write for people."""
        self._program = [sys.executable, "-m", "surefoot.commands.tune.worker", *(["fork"] if forks else [])]
        self._forks, self._printed = forks, printed
        self._worker: subprocess.Popen[str] | None = None
        self._requested = 0

    def attempt(self, request: Request, *, limit: float | None = None) -> Answer:
        """limit: seconds after which the trial is killed."""
        started = time.monotonic()
        worker = self._worker or self._start()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(worker)

        timer = threading.Timer(limit, give_up) if limit is not None else None
        if timer:
            timer.start()
        try:
            said = self._ask(worker, request)  # None from a process that ended
        finally:
            if timer:
                timer.cancel()
        answer: dict[str, Any] = {"ended": worker.wait()} if said is None else said
        if said is None or late.is_set() or not self._forks:
            self.end()
        whole = time.monotonic() - started
        if late.is_set() and "ended" in answer:
            return Answer(None, f"not done after {limit:.0f} s", whole, NOT_DONE)
        if "ended" in answer:
            killed = answer["ended"] in _OUT_OF_MEMORY
            return Answer(None, self._ending(answer["ended"]), whole, NO_MEMORY if killed else "")
        if "error" in answer:
            return Answer(None, veiled(answer["error"]), whole, answer["code"])
        return Answer(_TRIAL.validate_python(answer["trial"]), "", whole)

    def _start(self) -> subprocess.Popen[str]:
        """In a session of its own: Ctrl-C is for the search, which ends this."""
        self._worker = subprocess.Popen(
            self._program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            encoding="utf-8",
            start_new_session=True,
        )
        return self._worker

    def _ask(self, worker: subprocess.Popen[str], request: Request) -> dict[str, Any] | None:
        """None where the process ended without an answer. What else it said about an earlier request is passed over."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        self._requested += 1
        with suppress(BrokenPipeError):
            worker.stdin.write(json.dumps({"number": self._requested, **asdict(request)}) + "\n")
            worker.stdin.flush()
        while (line := worker.stdout.readline()).endswith(
            "\n"
        ):  # a piece of a line is the last word of what was killed
            answer = json.loads(line)
            if answer["number"] == self._requested:
                return answer
        return None

    def _ending(self, code: int) -> str:
        if code in _OUT_OF_MEMORY:
            return "killed, as the system does to what takes too much memory"
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _TAIL))
        last = self._printed.read().decode("utf-8", "replace").strip().splitlines() or ["no word"]
        return f"broke off with exit code {code}: {veiled(last[-1])}"

    def end(self) -> None:
        """Whatever it is at."""
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        _kill(worker)
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _kill(worker: subprocess.Popen[str]) -> None:
    """With the trial that it waits for."""
    if sys.platform == "win32":
        worker.kill()
        return
    with suppress(ProcessLookupError):
        # The whole group: the worker may wait for a forked trial, which would go on computing without it.
        os.killpg(worker.pid, signal.SIGKILL)


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
        requested = _digest({"config": request.config, "steps": request.steps, "rounds": request.rounds})
        if self._next < len(self._known):
            if self._known[self._next][0] == requested:
                self._next += 1
                return self._known[self._next - 1][1]
            self._known = self._known[: self._next]
        answer = measure()
        if self._path is not None:
            self._add(requested, answer)
        return answer

    def finish(self) -> None:
        if self._path is not None:
            durable.remove(self._path)

    def _add(self, requested: str, answer: Answer) -> None:
        assert self._path is not None
        self._known.append((requested, answer))
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
