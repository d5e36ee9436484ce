"""Who keeps what went wrong in a run, and how a step that was not finite is looked into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from surefoot.data.batch import Weighted
from surefoot.models.modes import is_compiled
from surefoot.training.device_errors import is_device_error
from surefoot.training.diagnose import Finding, agreed_origin, find_origin, source_of
from surefoot.training.engine import Engine
from surefoot.training.failure_names import Phase
from surefoot.training.objective import Objective
from surefoot.training.report import StepReport
from surefoot.training.scaling import LossScale
from surefoot.training.step import StepSettings

AnyBatch = TypeVar("AnyBatch", bound=Weighted)


@dataclass(frozen=True)
class Attempt:
    """What was begun of a step: the step itself, or what comes before or after it. micro_batches, lr (of each group of
    parameters), scale (of fp16): those of the step, as far as they were known."""

    step: int
    micro_batches: Sequence[Weighted] = ()
    lr: Mapping[str, float] = field(default_factory=dict)
    scale: LossScale | None = None
    phase: Phase = "step"


class AtHand:
    """The batch that an evaluation computes, for a recorder. batch: None between two, and where there is none."""

    def __init__(self) -> None:
        self.batch: Weighted | None = None

    def each(self, batches: Iterable[AnyBatch]) -> Iterator[AnyBatch]:
        """The same batches."""
        self.batch = None
        for batch in batches:
            self.batch = batch
            yield batch
            self.batch = None


class Recorder(Protocol):
    """Keeps what went wrong, so that it can be run again. Raises nothing."""

    def failed(self, attempt: Attempt, report: StepReport, finding: Finding) -> None:
        """A step was not finite; called on the rank that saw it."""
        ...

    def crashed(self, attempt: Attempt, error: Exception) -> None:
        """It raised an exception on this rank, which ends the run."""
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
    suspects = f"{'compiled code, ' if is_compiled(engine.model) else ''}the hardware or a non-deterministic kernel"
    finite = f"a replay of the step was finite: suspect {suspects}"
    return failed or agreed_origin(engine, finding.origin) or finite
