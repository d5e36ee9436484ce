"""Record a failed step in a folder, so that it can be replayed elsewhere. Folder names: see `failure_names`.

    failure.json          the step, what was seen, seed, learning rates, loss scale; layout of the batches
    batch.safetensors     a step's micro-batches on this rank, or an evaluation's current batch
    weights.safetensors   the trainable parameters, if they are small enough and a replay needs them
    config.yaml, plan.json, environment.json, flight.jsonl (the steps before)
    MANIFEST.json         sizes and hashes of all these, and the run's identity

The folder is written completely or not at all, and contains no code. The guard does not update weights in a non-finite
step, so the trainable weights are those with which the step began; frozen ones are the base model's.

Device errors and out-of-memory errors are not recorded, because they say nothing about the computed values. torch has
one class for driver errors and one for its accelerator allocator; errors of CUDA libraries and of the CPU allocator are
plain RuntimeErrors, recognized by their text.
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
    """The largest finite magnitude among the trainable weights, and its parameter."""

    name: str
    magnitude: float

    def __str__(self) -> str:
        return f"largest trainable weight: {self.magnitude:.4g}, in {self.name}"


@dataclass(frozen=True)
class Failure:
    """Record of a failed step.

    step: the step that failed, in itself or in a `phase` before or after it.
    kind: a non-finite value, or an exception.
    seed: the run's seed.
    numbers: `draw_number` of each micro-batch of the step.
    weight: total loss weight of the step over all ranks; 0 if unknown.
    lr: parameter group -> learning rate.
    scale: fp16 loss scale; None in other precisions.
    finding: result of the replay that the run itself made.
    loss, grad_norm: values of the step as it ran; `non_finite` names the non-finite one.
    error: type and message of the exception.
    place: module in which it was raised.
    bad_weights: names of parameters that were themselves non-finite.
    largest: the largest trainable weight; None if unknown, as in older records.
    rollbacks: the run's rollbacks before the failure.
    examples: the examples of the step or evaluation, as far as known.
    needs: what a replay needs: "weights", the weights at that time; "run", all state of the run, so that the steps
        since a checkpoint are repeated; "data", only the data.
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
        """What the run was doing, for messages."""
        return moment(self.step, self.phase)

    @property
    def steps_before(self) -> int:
        """The last step completed before the failure."""
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
                "losses": [loss.hex() for loss in finding.losses],  # exact, and can represent NaN
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """Raises KeyError, TypeError or ValueError for data that `to_json` has not made."""
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
class SavedFailure:
    """A failure folder, read from disk.

    batches: micro-batches of the rank that wrote it, on the CPU.
    weights: name -> trainable parameter; None if they were not saved.
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
    """Write a failure folder under `run`; return its path.

    weights: name -> trainable parameter; None to leave them out.
    texts: file name -> content of further files.
    identity: hashes and versions of the run, for the manifest.

    Raises EnvironmentFault if the disk cannot be written, TypeError for unknown types of batches.
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


def read_failure(folder: Path) -> SavedFailure:
    """Read a failure folder. Raises InputError if it is not one, IntegrityError if its files were changed."""
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
        return SavedFailure(Failure.from_json(content), batches, weights)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(unreadable(folder / RECORD, error)) from None


AnyBatch = TypeVar("AnyBatch", bound=Weighted)


@dataclass(frozen=True)
class Attempt:
    """A phase of a step that was started. micro_batches, lr (per parameter group) and scale (fp16) as far as known."""

    step: int
    micro_batches: Sequence[Weighted] = ()
    lr: Mapping[str, float] = field(default_factory=dict)
    scale: LossScale | None = None
    phase: Phase = "step"


class CurrentBatch:
    """Tracks the batch that an evaluation is processing, for a recorder.

    batch: the current batch; None between batches.
    """

    def __init__(self) -> None:
        self.batch: Weighted | None = None

    def each(self, batches: Iterable[AnyBatch]) -> Iterator[AnyBatch]:
        """Yield `batches`, keeping track of the current one."""
        self.batch = None
        for batch in batches:
            self.batch = batch
            yield batch
            self.batch = None


class Recorder(Protocol):
    """Records failures for a replay. Its methods raise nothing."""

    def failed(self, attempt: Attempt, report: StepReport, finding: Finding) -> None:
        """Record a non-finite step; called on the rank that found its origin."""
        ...

    def crashed(self, attempt: Attempt, error: Exception) -> None:
        """Record an exception on this rank, which ends the run."""
        ...


def look_into(
    engine: Engine,
    objective: Objective,
    settings: StepSettings,
    attempt: Attempt,
    report: StepReport,
    recorder: Recorder | None,
) -> str:
    """Find, record and describe the origin of a step's first non-finite value; the text is the same on all ranks. The
    rank that found it writes the record. Device errors are raised. Collective."""
    try:
        finding = find_origin(
            engine, objective, attempt.micro_batches, step=attempt.step, scale=attempt.scale, settings=settings
        )
    except Exception as error:
        # Other ranks wait inside the pass, so this one cannot continue; and a failing device explains the bad value.
        if engine.world > 1 or is_device_error(error):
            raise
        finding, failed = Finding(None, ()), f"its replay failed ({type(error).__name__}: {error})"
    else:
        failed = ""
    if recorder is not None:
        if engine.rank == (source_of(engine, finding.origin) or 0):
            recorder.failed(attempt, report, finding)
        engine.totals([0.0])  # barrier: no rank may end the run while another writes the record
    suspects = f"{'compiled code, ' if is_compiled(engine.model) else ''}the hardware or a non-deterministic kernel"
    finite = f"a replay of the step was finite, so suspect {suspects}"
    return failed or agreed_origin(engine, finding.origin) or finite


_LIBRARY = re.compile(r"\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_\w+|\b(CUDA|HIP|MPS|NCCL) error\b")
# torch raises its class for device errors also when the driver or a library fails to allocate memory.
_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried to allocate|can't allocate memory"
    r"|\b(CUDA|HIP) error: out of memory|\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def is_device_error(error: BaseException) -> bool:
    """Whether the error comes from the device or its libraries; out of memory does not count."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and bool(_LIBRARY.search(str(error)))
    )


def is_of_the_environment(error: BaseException) -> bool:
    """Whether the device failed or memory ran out, so that another implementation would not help."""
    return is_out_of_memory(error) or is_device_error(error)
