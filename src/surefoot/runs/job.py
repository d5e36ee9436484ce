"""Build the training loop's job from a prepared run: how checkpoints are written and which are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.files import PROCESSOR_FILES
from surefoot.methods.method import LoadedModels
from surefoot.report.log_copies import LogCopies
from surefoot.report.log_marks import LogMarks
from surefoot.report.observer import RunObserver, SilentObserver
from surefoot.report.trainer_log import trainer_state
from surefoot.runs.prepared import PreparedRun, make_schedules
from surefoot.system import durable
from surefoot.training.activity import Activity
from surefoot.training.background import BackgroundWriter
from surefoot.training.checkpoint import PendingCheckpoint, begin_checkpoint, retain
from surefoot.training.loop import Job
from surefoot.training.report import EvalReport
from surefoot.training.state import Goal, RunState


def make_job(
    run: PreparedRun,
    loaded: LoadedModels,
    evaluate: Callable[[int], EvalReport | None] | None,
    observer: RunObserver | SilentObserver,
    activity: Activity,
    writer: BackgroundWriter | None = None,
) -> Job:
    """Build the loop's job.

    run: the run; its task has its models.
    evaluate: step -> report; None if the run does not evaluate.
    observer, activity: are notified of progress.
    writer: finishes checkpoints in the background, in single-process runs.
    """
    config, task, timetable = run.config, run.task, run.timetable
    keep_best, stopping = _keeps_best(config), config.early_stopping
    return Job(
        engine=loaded.engine,
        objective=task.objective,
        batches=task.batches,
        schedules=make_schedules(run, loaded.engine.groups),
        settings=replace(loaded.settings, bounds=task.bounds),
        total_steps=timetable.total_steps,
        evaluate=evaluate,
        eval_steps=timetable.eval_steps,
        save=partial(
            _save_checkpoint, run, loaded, observer, activity, writer, (LogCopies(run.folder), LogMarks(run.folder))
        ),
        saved=(lambda wait: ()) if writer is None else writer.finished,
        save_steps=timetable.save_steps,
        keep_best=keep_best,
        goal=Goal(config.checkpoint.best) if keep_best else Goal(),
        max_consecutive=config.guard.max_consecutive,
        max_recent=config.guard.max_recent,
        clip_spikes=config.guard.spikes == "clip",
        patience=stopping.patience if stopping else None,
        min_delta=stopping.min_delta if stopping else 0.0,
        memory=task.memory,
        check_every=config.parallel.check_every if loaded.engine.world > 1 else None,
    )


def _keeps_best(config: RunConfig) -> bool:
    return config.checkpoint.best != "none"


def _save_checkpoint(
    run: PreparedRun,
    loaded: LoadedModels,
    observer: RunObserver | SilentObserver,
    activity: Activity,
    writer: BackgroundWriter | None,
    logs: tuple[LogCopies, LogMarks],
    state: RunState,
) -> Path | None:
    """Write a checkpoint; see `Job.save`. The observer excludes the time from the step's.

    writer: finishes the checkpoint in the background. Single process only: ranks agree on a checkpoint by a collective,
        which must not run concurrently with those of a step.
    """
    plan = run.plan
    whole = plan.adapter is None or (plan.ppo is not None and plan.ppo.critic.value == "model")
    with observer.during("saving"), activity.during("saving"):
        observer.sync()
        with begin_checkpoint(
            run.folder,
            loaded.engine,
            state,
            carried=run.task.memory.tensors() if run.task.memory else None,
            trainer_state=_trainer_state(run, observer, state),
            identity=run.identity,
            frozen=whole or plan.tokenizer.added_rows > 0,
        ) as pending:
            if pending.folder is not None:
                _write_model(run, loaded, state, pending.folder)
                for one in logs:
                    one.write(pending.folder, state.step, evaluated=state.evaluated == state.step)
        finish = partial(_finish_checkpoint, pending, run, loaded, state)
        return finish() if writer is None or loaded.engine.world > 1 else writer.take(finish, pending.size, state)


def _write_model(run: PreparedRun, loaded: LoadedModels, state: RunState, folder: Path) -> None:
    """Write weights, config and tokenizer in the standard format, and the stage's own files."""
    loaded.write_weights(folder)
    run.tokenizer.save_pretrained(folder)
    for name in PROCESSOR_FILES:
        if (run.base / name).is_file():
            durable.copy_file(run.base / name, folder / name)
    if run.task.write is not None:
        run.task.write(folder)
    scale = run.plan.tokenizer.bos_scale.value
    if scale != 1:
        durable.write_json(folder / BOS_FILE, bos_file(scale, state.step))


def _finish_checkpoint(pending: PendingCheckpoint, run: PreparedRun, loaded: LoadedModels, state: RunState) -> Path:
    """Commit the checkpoint, then delete older ones: in this order, a kill leaves at least one intact."""
    folder = pending.finish()
    if loaded.engine.rank == 0:
        best = state.best.step if _keeps_best(run.config) and state.best else None
        retain(run.folder, run.config.checkpoint.keep, best)
    return folder


def _trainer_state(run: PreparedRun, observer: RunObserver | SilentObserver, state: RunState) -> dict[str, Any]:
    timetable, best = run.timetable, state.best
    return trainer_state(
        observer.rows,
        step=state.step,
        total_steps=timetable.total_steps,
        epoch=timetable.epoch(state.step),
        epochs=timetable.epoch(timetable.total_steps),
        total_tokens=state.tokens,
        batch_size=run.plan.batch.micro.value,
        log_every=run.config.log_every,
        best_step=best.step if best else None,
        best_value=best.value if best else None,
    )
