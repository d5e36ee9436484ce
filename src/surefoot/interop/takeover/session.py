"""Run a training script in a child process and exchange messages with it (`in_script.start`)."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.interop.faults import script_error
from surefoot.interop.launch import Command, Options, python_words
from surefoot.interop.takeover.in_script.handover import RECORD
from surefoot.interop.translation import GivenMode
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError

TAKEN, RUN = "taken-over", "surefoot"
"""Folders in the script's output_dir: what it handed over, and the run."""

_ROWS = "train.jsonl"
_POLL, _GRACE = 0.2, 10.0  # seconds
_HERE = Path(__file__).parent
_START = f"import sys; sys.path.insert(0, {str(_HERE)!r}); from in_script.start import main; del sys.path[0]; main()"
_TRAINS = re.compile(r"\b\w*Trainer\b[\s\S]*\.train\(")  # a Trainer, and a call of train()


def find_script(command: Command, options: Options) -> str | None:
    """Return the path of a script that trains with a Trainer; None for other commands."""
    if command.module or not command.program.endswith(".py"):
        return None
    path = Path(command.program)
    return command.program if path.is_file() and _TRAINS.search(options.read(command.program)) else None


@dataclass(frozen=True)
class Taken:
    """What a script handed over.

    folder: its files.
    record: the content of handover.json.
    stored: it was handed over earlier, and a run with it has begun.
    """

    folder: Path
    record: Mapping[str, Any]
    stored: bool = False

    @property
    def places(self) -> Sequence[int]:
        """Index in the script's data set of each row of train.jsonl."""
        return self.record["places"]

    @property
    def mode(self) -> GivenMode | None:
        """What the script itself asks for where there is a run: train(resume_from_checkpoint=...), or transformers 4's
        overwrite_output_dir."""
        if self.record["resume"]:
            return "resume"
        return "overwrite" if self.record["arguments"].get("overwrite_output_dir") else None

    def settled(self, mode: GivenMode | None) -> tuple[Taken, list[str]]:
        """Move the files to their final folder. A run that continues keeps the files that it began with: the script may
        draw new weights or another order each time.

        mode: what to do with a run that is there; None: refuse to start.

        Returns what is to be trained, and the names of what the script would hand over differently now.
        Raises InputError if there is a run and no mode, or a folder that surefoot did not write.
        """
        final, run = self.folder.with_name(TAKEN), self.folder.with_name(RUN)
        if mode == "resume" and run.is_dir() and (final / RECORD).is_file():
            stored = Taken(final, _record(final), stored=True)
            changed = self._changes(stored)
            durable.remove(self.folder)
            return stored, changed
        if mode is None and run.is_dir() and any(run.iterdir()):
            fix = "continue it with --resume, or replace it with --overwrite"
            raise InputError(Fault(str(run), "has a run already", fix, code="SF-USE-OUTPUT"))
        if final.exists():
            if not (final / RECORD).is_file():
                raise InputError(Fault(str(final), "is not surefoot's", "move it away", code="SF-USE-OUTPUT"))
            durable.remove(final)
        durable.move(self.folder, final)
        return replace(self, folder=final), []

    def _changes(self, stored: Taken) -> list[str]:
        now, before = self.record["arguments"], stored.record["arguments"]
        names = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        same = durable.sha256_file(self.folder / _ROWS) == durable.sha256_file(stored.folder / _ROWS)
        return names if same else [*names, _ROWS]


def _only_rank() -> dict[str, str]:
    """Return the variables that a launcher sets, as for its only process: the script runs once, for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    counts = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**counts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


class Session:
    """A running script. Use as a context manager, which ends the script: by itself where it waits for an answer, else,
    after an exception, by SIGTERM and at last SIGKILL."""

    def __init__(self, words: Sequence[str], command: Command, *, to_stderr: bool = False):
        """Start the script.

        words: the command line as typed; names the Python.
        command: the same, without what starts the script.
        to_stderr: print what the script prints there, so that stdout has surefoot's lines alone.
        """
        self._script = command.program
        python = python_words(words)
        with tempfile.TemporaryDirectory(prefix="surefoot-") as folder, socket.socket(socket.AF_UNIX) as listening:
            path = f"{folder}/socket"
            listening.bind(path)
            listening.listen(1)
            listening.settimeout(_POLL)
            self._process = subprocess.Popen(
                [*python, "-c", _START, path, str(command.processes), command.program, *command.arguments],
                env={**os.environ, **command.environment, **(_only_rank() if command.launcher else {})},
                stdout=2 if to_stderr else None,
            )
            try:
                self._socket = self._connected(listening)
            except KeyboardInterrupt:
                self._end()
                raise
        self._in, self._out = self._socket.makefile("r"), self._socket.makefile("w")

    def _connected(self, listening: socket.socket) -> socket.socket:
        while True:
            try:
                return listening.accept()[0]
            except TimeoutError:
                if (code := self._process.poll()) is not None:
                    raise script_error(self._script, f"its Python did not start (exit code {code})") from None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a script that waits for an answer ends
        self._socket.close()
        if kind is None:
            self._process.wait()
        else:
            self._end()

    def _end(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
                return

    def taken(self) -> Taken:
        """Wait until the script calls train(), and return what it handed over. Raises InputError if it ends before."""
        message = self._receive()
        if message is None:
            code = self._process.wait()
            ended = "ended" if code == 0 else f"failed (exit code {code}, its own messages are above)"
            raise script_error(self._script, f"{ended} before it called Trainer.train()", "run it with python alone")
        return Taken(Path(message["folder"]), _record(Path(message["folder"])))

    def loss_of(self, places: Sequence[int], dropped: Sequence[str]) -> Mapping[str, float]:
        """Return the script's own loss of these rows of its data set, as `HandOver.loss_of` does."""
        message = (
            self._receive() if self._sent({"kind": "loss", "rows": list(places), "dropped": list(dropped)}) else None
        )
        if message is None:
            code = self._process.wait()
            raise script_error(self._script, f"its own loss could not be computed (exit code {code})")
        return message

    def finish(self, run: Path, steps: int, loss: float | None) -> int:
        """Let the script continue with the trained weights; return its exit code."""
        self._sent({"kind": "trained", "run": str(run.resolve()), "steps": steps, "loss": loss})
        return self._process.wait()

    def _sent(self, message: Mapping[str, Any]) -> bool:
        """Send a message, and return whether the script was still there."""
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except OSError:
            return False
        return True

    def _receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the script has ended. Processes that it started may hold the connection."""
        while not select.select([self._socket], [], [], _POLL)[0]:
            if self._process.poll() is not None:
                return None
        line = self._in.readline()
        return json.loads(line) if line else None
