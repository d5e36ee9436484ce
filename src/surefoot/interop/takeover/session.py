"""Run a training script in a child process and exchange messages with it (`in_script.start`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.interop.faults import script_error
from surefoot.interop.launch import Command, Options

_POLL = 0.2  # seconds
_HERE = Path(__file__).parent
_START = f"import sys; sys.path.insert(0, {str(_HERE)!r}); from in_script.start import main; del sys.path[0]; main()"
_TRAINS = re.compile(r"\b\w*Trainer\b[\s\S]*\.train\(")  # a Trainer, and a call of train()
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")


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
    """

    folder: Path
    record: Mapping[str, Any]

    @property
    def places(self) -> Sequence[int]:
        """Index in the script's data set of each row of train.jsonl."""
        return self.record["places"]


class Session:
    """A running script. Use as a context manager, which ends the script if it still waits for an answer."""

    def __init__(self, words: Sequence[str], command: Command):
        """Start the script.

        words: the command line as typed; names the Python.
        command: the same, without what starts the script.
        """
        self._script = command.program
        with tempfile.TemporaryDirectory(prefix="surefoot-") as folder, socket.socket(socket.AF_UNIX) as listening:
            path = f"{folder}/socket"
            listening.bind(path)
            listening.listen(1)
            listening.settimeout(_POLL)
            self._process = subprocess.Popen(
                [_python(words), "-c", _START, path, command.program, *command.arguments],
                env={**os.environ, **command.environment},
            )
            self._socket = self._connected(listening)
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

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a script that waits for an answer ends
        self._socket.close()
        self._process.wait()

    def taken(self) -> Taken:
        """Wait until the script calls train(), and return what it handed over. Raises InputError if it ends before."""
        message = self._receive()
        if message is None:
            code = self._process.wait()
            ended = "ended" if code == 0 else f"failed (exit code {code}, its own messages are above)"
            raise script_error(self._script, f"{ended} before it called Trainer.train()", "run it with python alone")
        folder = Path(message["folder"])
        return Taken(folder, json.loads((folder / "handover.json").read_text(encoding="utf-8")))

    def loss_of(self, places: Sequence[int]) -> Mapping[str, float]:
        """Return the script's own loss of these rows of its data set, as `HandOver.loss_of` does."""
        self._send({"kind": "loss", "rows": list(places)})
        message = self._receive()
        if message is None:
            code = self._process.wait()
            raise script_error(self._script, f"its own loss could not be computed (exit code {code})")
        return message

    def finish(self, run: Path, steps: int, loss: float | None) -> int:
        """Let the script continue with the trained weights; return its exit code."""
        self._send({"kind": "trained", "run": str(run.resolve()), "steps": steps, "loss": loss})
        return self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def _receive(self) -> dict[str, Any] | None:
        line = self._in.readline()
        return json.loads(line) if line else None


def _python(words: Sequence[str]) -> str:
    """Return the Python that would run the script: the one named, or the one beside the launcher."""
    for word in words:
        if _PYTHON.fullmatch(word):
            return word
        if launcher := shutil.which(word):
            beside = Path(launcher).with_name("python")
            return str(beside) if beside.is_file() else sys.executable
    return sys.executable
