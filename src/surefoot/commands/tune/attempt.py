"""Run trials in other processes, and store their results in a file.

    with workshop(forks=True) as shop:
        answer = shop.attempt(Request(config, steps=4, rounds=2), limit=60)

A search is determined by the results of its trials, so their sequence is its whole state: `Journal` stores them, and a
restarted search gets them back for as long as it makes the same requests, and then continues to measure.
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

NOT_DONE = "NOT-DONE"  # code of a trial that took too long
_TRIAL = TypeAdapter(Trial)
_OUT_OF_MEMORY = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit codes after the kernel's out-of-memory killer
_TAIL = 4096  # bytes read from the end of a trial's output


@dataclass(frozen=True)
class Request:
    """A trial. config: plain values. steps: timed steps, repeated `rounds` times. rival, clock: see `run_trial`."""

    config: Mapping[str, Any]
    steps: int
    rounds: int
    rival: Rival | None = None
    clock: Clock = "wall"


@dataclass(frozen=True)
class Answer:
    """The result of a trial. trial: None if it failed; then failure says why. whole: seconds including the start. code:
    of the fault, see `Fault`, or NOT_DONE."""

    trial: Trial | None
    failure: str = ""
    whole: float = 0.0
    code: str = ""


def can_fork(device: str) -> bool:
    """Whether trials on this kind of device may be forks of one process. A GPU driver's state cannot be forked, and
    outside Linux libraries do not support it."""
    return device == "cpu" and sys.platform.startswith("linux")


@contextmanager
def workshop(*, forks: bool) -> Iterator[Workshop]:
    """Yield a `Workshop`. forks: whether trials are forks of one process, see `can_fork`; else each is a new process.
    All trials end with the block."""
    with tempfile.TemporaryFile() as printed:
        shop = Workshop(printed, forks=forks)
        try:
            yield shop
        finally:
            shop.end()


class Workshop:
    """The process that runs the trials, or starts them. It starts with the first trial."""

    def __init__(self, printed: IO[bytes], *, forks: bool):
        """printed: file for the output of trials and libraries."""
        self._program = [sys.executable, "-m", "surefoot.commands.tune.worker", *(["fork"] if forks else [])]
        self._forks, self._printed = forks, printed
        self._worker: subprocess.Popen[str] | None = None
        self._requested = 0

    def attempt(self, request: Request, *, limit: float | None = None) -> Answer:
        """Run a trial. limit: seconds after which it is killed."""
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
        """Start it in its own session, so that Ctrl-C reaches only the search, which then ends it."""
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
        """Return None if the process ended without an answer. Late answers to earlier requests are skipped."""
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
            return "killed, probably because it ran out of memory"
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _TAIL))
        last = self._printed.read().decode("utf-8", "replace").strip().splitlines() or ["no word"]
        return f"ended with exit code {code}: {veiled(last[-1])}"

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
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
    """Kill the worker and its current trial."""
    if sys.platform == "win32":
        worker.kill()
        return
    with suppress(ProcessLookupError):
        # The whole process group, because a forked trial would continue without the worker.
        os.killpg(worker.pid, signal.SIGKILL)


_FORMAT = 1
_ANSWER = TypeAdapter(Answer)


class Journal:
    """The file of results: a first line describing the search, then one line per trial. path: None stores nothing."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]):
        """about: everything besides the requests that results depend on, as JSON values. A file about another search is
        replaced."""
        self._path = path
        self._head = json.dumps({"format": _FORMAT, "about": _digest(about)})
        self._known = _read(path, self._head) if path is not None else []
        self._next = 0

    @property
    def known(self) -> int:
        """Number of stored answers not used yet."""
        return len(self._known) - self._next

    def answer(self, request: Request, measure: Callable[[], Answer]) -> Answer:
        """Return the stored answer if the next one is for this request, else the result of `measure`. The rival and the
        limit follow from earlier answers, so they are not compared."""
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
    """Raises InputError if another file is in its place, which a search would replace and remove."""
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
    """Stored answers; empty for a damaged file or another search."""
    try:
        first, *lines = plain_files.read_text(path).splitlines()
        if first != head:
            return []
        found = [json.loads(line) for line in lines]
        return [(one["asked"], _ANSWER.validate_python(one["answer"])) for one in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return []
