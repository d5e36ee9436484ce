"""`surefoot replay RUN`: repeat, in a child process, the step in which the last process of a run died.

The step may kill the process that runs it before that can report. The parent reads the child's output, needs neither
torch nor the model, and survives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.report.death import Death, death_in_a_step, read_trace
from surefoot.system.errors import EnvironmentFault, Fault, InputError, IntegrityError, SurefootError

_PROGRAM = (sys.executable, "-m", "surefoot.runs.failures.replay_run")
_WORDS = 300  # characters of the last line
_REFUSALS: dict[int, type[SurefootError]] = {
    one.exit_code: one for one in (InputError, EnvironmentFault, IntegrityError)
}


@dataclass(frozen=True)
class TakenAgain:
    """How the step ended in the child process.

    death: what is known of the process that died.
    start: step of the checkpoint where the replay started, 0 for the base model.
    ended: how the child died: a signal's name or number; empty if it did not.
    inside: whether that happened in the step itself.
    where: how far it got, in words.
    line: line of Python code, if known.
    error: type and message of an exception.
    place: the module that raised it.
    report: report of a step that succeeded.
    plain: whether it ran in plain fp32 without fast paths.
    cautions: differences between this process and the run.
    """

    death: Death
    start: int
    ended: str
    inside: bool
    where: str
    line: str
    error: str
    place: str
    report: dict[str, Any] | None
    plain: bool
    cautions: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the step kills its process again, or raises again."""
        return self.inside and bool(self.ended or (self.error and self.death.error))


def replay_run(run: Path, *, moved: Sequence[str] = (), plain: bool = False) -> TakenAgain:
    """moved, plain: see `surefoot.runs.failures.replay.replay`. Raises InputError for a run whose last process exited
    normally or outside a step, and the errors of `replay_run.rerun_step`."""
    death = death_in_a_step(run)
    requested = {"run": str(run), "begun": death.begun, "moved": list(moved), "plain": plain, "parent": os.getpid()}
    done = subprocess.run(
        _PROGRAM, input=json.dumps(requested), capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    child = ChildReport.of(done.stdout, death.begun["begins"])
    if child.fault is not None:
        raise _REFUSALS.get(child.fault["code"], SurefootError)(
            [Fault(*one, code="SF-REPLAY") for one in child.fault["faults"]]
        )
    over = child.raised is not None or child.report is not None
    raised = child.raised or {}
    return TakenAgain(
        death=death,
        start=child.start,
        ended="" if over else _ending(done.returncode),
        inside=child.inside,
        where=child.where,
        line="" if over else _python_line(done.stderr),
        error=raised.get("error", ""),
        place=raised.get("place", ""),
        report=child.report,
        plain=plain,
        cautions=tuple(child.cautions),
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _python_line(stderr: str) -> str:
    """stderr: the child's stderr."""
    if (trace := read_trace(stderr)) is not None:
        return trace.place
    return next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")[:_WORDS]


@dataclass
class ChildReport:
    """What the child reported, see `replay_run`. last: the step to replay."""

    last: int
    start: int = 0
    cautions: list[str] = field(default_factory=list)
    raised: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    fault: dict[str, Any] | None = None
    _step: int = 0
    _part: str = ""
    _modules: list[str] = field(default_factory=list)  # nested modules that the forward pass is in
    _reached: str = ""

    @classmethod
    def of(cls, stdout: str, last: int) -> ChildReport:
        report = cls(last)
        for line in stdout.splitlines():
            report._read(*line.partition(" ")[::2])
        return report

    def _read(self, word: str, text: str) -> None:
        match word:
            case "starts":
                self.start = int(text)
            case "caution":
                self.cautions.append(text)
            case "step":
                self._step = int(text)
            case "part":
                self._part, self._reached = text, ""
                self._modules.clear()
            case "enters":
                self._modules.append(text)
            case "leaves" if text in self._modules:
                del self._modules[self._modules.index(text) :]
            case "reaches":
                self._reached = text
            case "raised" | "done" | "fault":
                setattr(self, {"done": "report"}.get(word, word), json.loads(text))

    @property
    def inside(self) -> bool:
        return self._step == self.last and self._part != "data"

    @property
    def where(self) -> str:
        if not self._step:
            return "while the run was made ready"
        if not self.inside:
            return (
                f"before that step, in step {self._step}" if self._step < self.last else "while its batches were made"
            )
        module = self._modules[-1] if self._modules else ""
        match self._part:
            case "forward":
                return f"in the forward pass of {module}" if module else "in the forward pass, in the loss function"
            case "backward" if module:
                return f"in the backward pass, where it computes {module} again"
            case "backward":
                return f"in the backward pass{f', at or behind {self._reached}' if self._reached else ''}"
            case "optimizer":
                return "where gradients are summed up and the weights are moved"
        return "between its passes"
