"""What a run keeps of a step that went wrong, so that it can be run again elsewhere: a folder, see `failure_names`.

    failure.json          which step, what was seen, seeds, rates, scale; the layout of the batches
    batch.safetensors     of a step the micro-batches of this rank, of an evaluation the batch that it was at, tensor by
                          tensor
    weights.safetensors   the parameters that train, as they were, where they are small enough and a replay needs them
    config.yaml, plan.json, environment.json, flight.jsonl (the steps before it)
    MANIFEST.json         sizes and hashes of all these, and what the run belongs to

The folder appears whole or not at all. Nothing in it is code. Weights that train are held back from moving by the guard
when a step is not finite, so they are those that the step began with; frozen ones are the base model's.

A device's own errors, and its memory's, are no such failure: they say nothing of what was computed. torch has a class
for what the driver reports and one for its own allocator on accelerators; what the libraries on top report, and its
allocator on the host, are plain RuntimeErrors, recognised by their words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file

from surefoot.data.batching.batch import RecordName, Weighted
from surefoot.data.batching.batch_file import batches_from_file, batches_to_file
from surefoot.models.modes import is_compiled
from surefoot.system import durable, plain_files
from surefoot.system.errors import IntegrityError
from surefoot.system.folders import FAILED_BATCH, FAILURE, require_failure
from surefoot.training.diagnose import Finding, Origin, agreed_origin, find_origin, source_of
from surefoot.training.engine import Engine
from surefoot.training.failure_names import Phase, failure_name, moment
from surefoot.training.guard import Rollback
from surefoot.training.manifest import MANIFEST, check_files, damaged, manifest, unreadable
from surefoot.training.objective import Objective
from surefoot.training.report import StepReport
from surefoot.training.state import LossScale
from surefoot.training.step import StepSettings

SCHEMA = 1
RECORD, BATCH, WEIGHTS = FAILURE, FAILED_BATCH, "weights.safetensors"
Needs = Literal["weights", "run", "data"]


@dataclass(frozen=True)
class Largest:
    """The largest magnitude of a weight that trains, among the finite ones, and the parameter that has it."""

    name: str
    magnitude: float

    def __str__(self) -> str:
        return f"the largest weight that trains: {self.magnitude:.4g}, in {self.name}"


@dataclass(frozen=True)
class Failure:
    """A step that went wrong, as it is recorded.

    step: the one that went wrong, in itself or in a `phase` before or after it.
    kind: a value that was not finite, or an exception.
    seed: of the run.
    numbers: of each micro-batch of a step, see `draw_number`.
    weight: of the whole step over all ranks, 0 where it was not known.
    scale: of fp16.
    finding: what a replay in the run itself saw.
    loss, grad_norm: of the step as it ran, which of them was not finite is in `non_finite`.
    error: type and words of the exception.
    place: the module in which it was raised.
    bad_weights: the parameters that were not finite themselves, in memory.
    largest: None where it is not known, as in older records.
    rollbacks: those of the run before it.
    examples: those that were to be learned from or evaluated, as far as they are known.
    needs: what makes it again: the weights of then; all that the run carries from step to step, so that the steps from
        a checkpoint on are taken again; or the data alone.
    """

    step: int
    kind: Literal["non_finite", "crash"]
    seed: int
    numbers: tuple[int, ...]
    weight: int
    lr: Mapping[str, float]
    scale: LossScale | None
    rank: int
    world: int
    finding: Finding | None
    loss: float | None = None
    grad_norm: float | None = None
    non_finite: str | None = None
    error: str = ""
    place: str = ""
    bad_weights: tuple[str, ...] = ()
    largest: Largest | None = None
    rollbacks: tuple[Rollback, ...] = ()
    phase: Phase = "step"
    examples: tuple[RecordName, ...] = ()
    needs: Needs = "weights"

    @property
    def moment(self) -> str:
        """What the run was doing, in words."""
        return moment(self.step, self.phase)

    @property
    def steps_before(self) -> int:
        """The last step that was done before it."""
        return self.step if self.phase == "evaluation" else self.step - 1

    def to_json(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "schema": SCHEMA,
            **asdict(self),
            "finding": None
            if finding is None
            else {
                "origin": finding.origin.to_json() if finding.origin else None,
                "losses": [loss.hex() for loss in finding.losses],  # exact, and NaN has a name
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not made."""
        content = {name: value for name, value in data.items() if name not in ("schema", "batches")}
        finding, scale, largest = content["finding"], content["scale"], content.get("largest")
        if finding is not None:
            origin = finding["origin"]
            losses = tuple(float.fromhex(loss) for loss in finding["losses"])
            finding = Finding(None if origin is None else Origin.from_json(origin), losses)
        return cls(
            **{
                **content,
                "finding": finding,
                "scale": None if scale is None else LossScale(**scale),
                "numbers": tuple(content["numbers"]),
                "bad_weights": tuple(content["bad_weights"]),
                "largest": None if largest is None else Largest(**largest),
                "rollbacks": tuple(Rollback(**one) for one in content.get("rollbacks", ())),
                "examples": tuple(content.get("examples", ())),
            }
        )


@dataclass(frozen=True)
class Kept:
    """A failure as it lies on the disk.

    batches: of the rank that wrote it, on the CPU.
    weights: by name, None where they were left out.
    """

    failure: Failure
    batches: list[Weighted]
    weights: dict[str, torch.Tensor] | None


def failure_folder(run: Path, failure: Failure) -> Path:
    return run / failure_name(failure.step, failure.phase, len(failure.rollbacks))


def write_failure(
    run: Path,
    failure: Failure,
    batches: Sequence[Weighted],
    weights: Mapping[str, torch.Tensor] | None,
    *,
    texts: Mapping[str, str],
    identity: Mapping[str, Any],
) -> Path:
    """Returns the folder.

    texts: further files by name.

    Raises EnvironmentFault where the disk refuses, TypeError for batches of an unknown kind.
    """
    tensors, layout = batches_to_file(batches)
    folder = failure_folder(run, failure)
    with durable.staged_folder(folder, replace=True) as staging:
        durable.write_json(staging / RECORD, {**failure.to_json(), "batches": layout})
        save_file(tensors, staging / BATCH)
        if weights is not None:
            whole = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            save_file(whole, staging / WEIGHTS)
        for name, text in texts.items():
            durable.write_text(staging / name, text)
        content = manifest(staging, sorted(staging.iterdir()), failure.step, identity)
        durable.write_json(staging / MANIFEST, content)
    return folder


def read_failure(folder: Path) -> Kept:
    """Raises InputError for a folder that is none of these, IntegrityError for one that is not as it was written."""
    require_failure(folder)
    if faults := [check.fault for check in check_files(folder) if check.fault]:
        raise IntegrityError(faults)
    try:
        content = json.loads(plain_files.read_text(folder / RECORD))
        if content.get("schema") != SCHEMA:
            what = f"has schema {content.get('schema')}; this version of surefoot reads {SCHEMA}"
            raise IntegrityError(damaged(folder / RECORD, what))
        batches = batches_from_file(load_file(folder / BATCH), content["batches"])
        weights = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else None
        return Kept(Failure.from_json(content), batches, weights)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(unreadable(folder / RECORD, error)) from None


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


class CurrentBatch:
    """Holds the batch that an evaluation computes, for a recorder.

    batch: None between two, and where there is none.
    """

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
        engine.totals([0.0])  # no rank ends the run while another one writes
    suspects = f"{'compiled code, ' if is_compiled(engine.model) else ''}the hardware or a non-deterministic kernel"
    finite = f"a replay of the step was finite: suspect {suspects}"
    return failed or agreed_origin(engine, finding.origin) or finite


_LIBRARY = re.compile(r"\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_\w+|\b(CUDA|HIP|MPS|NCCL) error\b")
# What torch raises is of the class for an error of the device where the driver or a library allocates by itself.
_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried to allocate|can't allocate memory"
    r"|\b(CUDA|HIP) error: out of memory|\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def is_device_error(error: BaseException) -> bool:
    """Of the device, or of a library that drives it; memory that it lacks is none."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and bool(_LIBRARY.search(str(error)))
    )


def is_of_the_environment(error: BaseException) -> bool:
    """A device that failed, or memory that was lacking: no other way to compute it would help."""
    return is_out_of_memory(error) or is_device_error(error)
