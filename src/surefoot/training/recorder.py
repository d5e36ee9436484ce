"""Who keeps what went wrong in a run, and how a step that was not finite is looked into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from surefoot.data.batch import Weighted
from surefoot.objectives.base import Objective
from surefoot.training.device_errors import is_device_error
from surefoot.training.diagnose import Finding, agreed_origin, find_origin, source_of
from surefoot.training.engine import Engine
from surefoot.training.report import StepReport
from surefoot.training.scaling import LossScale
from surefoot.training.step import StepSettings


@dataclass(frozen=True)
class Attempt:
    """A step as it was begun. lr: of each group of parameters. scale: of fp16."""

    step: int
    micro_batches: Sequence[Weighted]
    lr: Mapping[str, float]
    scale: LossScale | None


class Recorder(Protocol):
    """Keeps what went wrong, so that it can be run again. Raises nothing."""

    def failed(self, attempt: Attempt, report: StepReport, finding: Finding) -> None:
        """A step was not finite; called on the rank that saw it."""
        ...

    def crashed(self, attempt: Attempt, error: Exception) -> None:
        """A step raised an exception on this rank, which ends the run."""
        ...


def look_into(
    engine: Engine,
    objective: Objective,
    settings: StepSettings,
    attempt: Attempt,
    report: StepReport,
    recorder: Recorder | None,
) -> str:
    """Where a step's first non-finite value came from, in words, the same on all ranks, which must all ask. The rank
    that saw it has it recorded. Raises what the device raises."""
    try:
        finding = find_origin(
            engine, objective, attempt.micro_batches, step=attempt.step, scale=attempt.scale, settings=settings
        )
    except Exception as error:
        # others wait for this rank inside of the pass; a device that fails in it may have made what was not finite
        if engine.world > 1 or is_device_error(error):
            raise
        finding, failed = Finding(None, ()), f"its replay failed ({type(error).__name__}: {error})"
    else:
        failed = ""
    if recorder is not None:
        if engine.rank == (source_of(engine, finding.origin) or 0):
            recorder.failed(attempt, report, finding)
        engine.totals([0.0])  # nobody ends the run while another one writes
    finite = "a replay of the step was finite: suspect the hardware or a non-deterministic kernel"
    return failed or agreed_origin(engine, finding.origin) or finite
