"""Record failures of a run: a folder `failure-STEP`, and a hint how to replay it.

A failure can occur in a step, in making its batches, in the state that the stage carries over, or in an evaluation.

Small trained weights (an adapter's) are saved with the failure; those of full fine-tuning of a large model are not, and
a replay then repeats the steps from the last checkpoint. It does the same if weights are not all it needs: a rollout,
for example, depends on state that the stage carries over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from surefoot.config.dump import dump_plain, plain_config
from surefoot.data.batching.batch import RecordName, Weighted
from surefoot.methods.method import LoadedModels
from surefoot.planning.parallel import sharder
from surefoot.planning.plan import plan_to_json
from surefoot.report.flight import FLIGHT, recent
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.run_folder import CONFIG, PLAN
from surefoot.system import durable, hardware
from surefoot.system.redaction import veiled, veiled_value
from surefoot.training.diagnose import Finding, largest_finite, place_of_error
from surefoot.training.engine.base import own_part
from surefoot.training.failure import (
    Attempt,
    CurrentBatch,
    Failure,
    Largest,
    Needs,
    failure_folder,
    is_device_error,
    write_failure,
)
from surefoot.training.failure_names import Phase, failures_in, moment
from surefoot.training.report import StepReport
from surefoot.training.session import is_broken_connection
from surefoot.training.step import draw_number

ENVIRONMENT = "environment.json"
MOST = 4  # failure folders per run: the first ones and the newest
LARGEST = 512 * 2**20  # maximum bytes of weights saved with a failure
_RECENT = 50  # preceding steps that are recorded
_WORDS = 2000  # characters of an exception's message


class FailureRecorder:
    """Implements `training.failure.Recorder`.

    run: the run; its task has its models.
    say: prints a message of this rank.
    current_batch: the batch that an evaluation is at.
    """

    def __init__(self, run: PreparedRun, loaded: LoadedModels, say: Callable[[str], None], current_batch: CurrentBatch):
        self._run, self._loaded, self._say, self._current_batch = run, loaded, say, current_batch

    def failed(self, attempt: Attempt, report: StepReport, finding: Finding) -> None:
        self._keep(attempt, finding, None, report)

    def crashed(self, attempt: Attempt, error: Exception) -> None:
        # After a device error no value can be trusted. A connection broken by another rank is not this step's fault.
        broken = self._loaded.engine.world > 1 and is_broken_connection(error)
        if not is_device_error(error) and not broken:
            self._keep(attempt, None, error, None)

    def _keep(
        self, attempt: Attempt, finding: Finding | None, error: Exception | None, report: StepReport | None
    ) -> None:
        where = moment(attempt.step, attempt.phase)
        batches = attempt.micro_batches
        if attempt.phase == "evaluation" and self._current_batch.batch is not None:
            batches = [self._current_batch.batch]
        try:
            failure = self._failure(replace(attempt, micro_batches=batches), finding, error, report)
            written = self._write(batches, failure)
        except Exception as trouble:  # must not hide the run's own error
            self._say(f"{where}: what went wrong could not be written: {trouble}")
            return
        origin = finding.origin if finding else None
        what = f"{origin.what} ({origin.tensor})" if origin else failure.error or "a replay of it was finite"
        if failure.bad_weights:
            what += f"; weights that are not finite: {', '.join(failure.bad_weights[:3])}"
        elif origin and failure.largest:
            what += f"; {failure.largest}"
        self._say(f"{where}: {what}; kept in {written}, run it again with `surefoot replay {written}`")

    def _failure(
        self, attempt: Attempt, finding: Finding | None, error: Exception | None, report: StepReport | None
    ) -> Failure:
        engine = self._loaded.engine
        own = sum(batch.weight for batch in attempt.micro_batches)
        return Failure(
            step=attempt.step,
            kind="non_finite" if error is None else "crash",
            seed=self._loaded.settings.seed,
            numbers=tuple(draw_number(engine, number) for number in range(len(attempt.micro_batches))),
            weight=report.weight if report else own,
            lr=attempt.lr,
            scale=attempt.scale,
            rank=engine.rank,
            world=engine.world,
            finding=finding,
            loss=report.loss if report else None,
            grad_norm=report.grad_norm if report else None,
            non_finite=report.non_finite if report else None,
            error=veiled(f"{type(error).__name__}: {error}")[:_WORDS] if error else "",
            place=place_of_error(error, engine.model) if error else "",
            bad_weights=tuple(self._bad_weights()),
            largest=largest_weight(self._loaded.engine.parameters),
            rollbacks=self._run.existing.rollbacks,
            phase=attempt.phase,
            examples=self._examples(attempt),
            needs=self._needs(attempt.phase),
        )

    def _examples(self, attempt: Attempt) -> tuple[RecordName, ...]:
        """Names of the step's examples, known even without its batches (then of all ranks)."""
        if attempt.phase == "batches":
            return self._run.task.examples(attempt.step)
        return tuple(name for batch in attempt.micro_batches for name in batch.examples)

    def _needs(self, phase: Phase) -> Needs:
        task = self._run.task
        if phase == "batches" and task.ready is None:
            return "data"
        return "run" if phase == "memory" or (phase == "batches" and task.memory is not None) else "weights"

    def _write(self, batches: Sequence[Weighted], failure: Failure) -> Path:
        folder = self._run.folder
        self._make_room(folder, failure_folder(folder, failure))
        return write_failure(
            folder,
            failure,
            batches,
            self._weights(folder) if failure.needs == "weights" else None,
            texts=self._texts(),
            identity=self._run.identity,
        )

    def _make_room(self, folder: Path, own: Path) -> None:
        there = [path for path in failures_in(folder) if path != own]
        # Delete the newest of them, never the first: later failures are often only consequences.
        if len(there) >= MOST:
            durable.remove(there[-1])

    def _weights(self, folder: Path) -> dict[str, torch.Tensor] | None:
        parallel = self._loaded.plan.parallel
        if sharder(parallel) or parallel.offload != "none":
            return None  # sharded: no rank has all of them; offloaded: a replay would have to put them into two places
        weights = dict(self._loaded.engine.weights())
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        # Twice the size, so that the next checkpoint still fits.
        return weights if size <= LARGEST and 2 * size < hardware.free_disk(folder) else None

    def _bad_weights(self) -> list[str]:
        """Names of non-finite parameters. Frozen ones were corrupted after loading, by memory or a library; a replay,
        which loads them again, will not show this."""
        named = self._loaded.engine.model.named_parameters()
        return [name for name, one in named if one.is_floating_point() and not torch.isfinite(one).all()]

    def _texts(self) -> dict[str, str]:
        config = veiled_value(plain_config(self._run.config))
        lines = recent(self._run.folder)[-_RECENT:]
        return {
            CONFIG: dump_plain(config),
            PLAN: json.dumps({"plan": plan_to_json(self._loaded.plan)}, indent=2) + "\n",
            ENVIRONMENT: json.dumps(hardware.describe(), indent=2) + "\n",
            FLIGHT: "".join(f"{json.dumps(line)}\n" for line in lines),
        }


def largest_weight(parameters: Mapping[str, torch.Tensor]) -> Largest | None:
    """Return the largest weight of this rank's shard. In a tie (Adam's first step moves all weights by its learning
    rate) the first name wins, so that the result does not depend on the order."""
    magnitudes = {name: largest_finite(own_part(one.detach())) for name, one in parameters.items()}
    found = [Largest(name, magnitude) for name, magnitude in magnitudes.items() if magnitude is not None]
    return min(found, key=lambda one: (-one.magnitude, one.name), default=None)
