"""From a prepared run and its set-up to the loop's job: how a checkpoint is written, what is kept, who watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.config.durations import Duration
from surefoot.config.schema import RunConfig
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.methods.method import CRITIC, Stage
from surefoot.methods.table import KINDS
from surefoot.report.console import Console
from surefoot.report.log_copies import LogCopies
from surefoot.report.observer import RunObserver
from surefoot.report.rows import Row, trainer_state
from surefoot.report.silent import SilentObserver
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import cut_to_step
from surefoot.runs.prepared import Prepared
from surefoot.runs.setup import Setup
from surefoot.runs.timetable import Timetable, length_in_steps
from surefoot.system import durable, hardware
from surefoot.training.background import BackgroundWriter
from surefoot.training.beat import Activity
from surefoot.training.checkpoint import begin_checkpoint, retain
from surefoot.training.goal import Goal
from surefoot.training.loop import Job
from surefoot.training.report import EvalReport
from surefoot.training.schedule import Schedule
from surefoot.training.state import RunState


def open_observer(
    run: Prepared, setup: Setup, console: Console, on_row: Callable[[Row], None] | None = None
) -> RunObserver:
    """The observer of a fresh or resumed run; rows that lie after the resumed state are cut from the log."""
    state = setup.state
    rows = cut_to_step(run.folder / LOG, state.step, evaluated=state.evaluated == state.step)
    return RunObserver(
        console,
        run.folder,
        total_steps=run.timetable.total_steps,
        log_every=run.config.log_every,
        epoch=run.timetable.epoch,
        peak_memory=lambda: hardware.peak_memory(setup.engine.device.type),
        rows=rows,
        start_step=state.step,
        on_row=on_row,
        unit=KINDS[run.config.stage].unit,
        seed=run.config.seed,
    )


def make_job(
    run: Prepared,
    setup: Setup,
    evaluate: Callable[[int], EvalReport | None] | None,
    observer: RunObserver | SilentObserver,
    activity: Activity,
    writer: BackgroundWriter | None = None,
) -> Job:
    """All the loop needs. run: its stage has its models. writer: what finishes checkpoints beside the steps, where the
    run is one process."""
    config, stage, timetable = run.config, run.stage, run.timetable
    keep_best, stopping = _keeps_best(config), config.early_stopping
    return Job(
        engine=setup.engine,
        objective=stage.objective,
        batches=stage.batches,
        schedules=make_schedules(run, setup.engine.groups),
        settings=replace(setup.settings, bounds=stage.bounds),
        total_steps=timetable.total_steps,
        evaluate=evaluate,
        eval_steps=timetable.eval_steps,
        save=_saving(run, setup, observer, activity, writer),
        saved=(lambda wait: ()) if writer is None else writer.finished,
        save_steps=timetable.save_steps,
        keep_best=keep_best,
        goal=Goal(config.checkpoint.best) if keep_best else Goal(),
        max_consecutive=config.guard.max_consecutive,
        max_recent=config.guard.max_recent,
        clip_spikes=config.guard.spikes == "clip",
        patience=stopping.patience if stopping else None,
        min_delta=stopping.min_delta if stopping else 0.0,
        memory=stage.memory,
        check_every=config.parallel.check_every if setup.engine.world > 1 else None,
    )


def _keeps_best(config: RunConfig) -> bool:
    return config.checkpoint.best != "none"


def _saving(
    run: Prepared,
    setup: Setup,
    observer: RunObserver | SilentObserver,
    activity: Activity,
    writer: BackgroundWriter | None,
) -> Callable[[RunState], Path | None]:
    """What writes a checkpoint, by way of the observer, so that its time is not counted as the step's; see `Job`."""
    config, plan, stage = run.config, run.plan, run.stage
    scale = plan.tokenizer.bos_scale.value
    copies = LogCopies(run.folder)

    def save(state: RunState) -> Path | None:
        def write_model(folder: Path) -> None:
            setup.write_model(folder)
            if stage.write is not None:
                stage.write(folder)
            if scale != 1:
                durable.write_json(folder / BOS_FILE, bos_file(scale, state.step))
            copies.write(folder, state.step, evaluated=state.evaluated == state.step)

        with observer.during("saving"), activity.during("saving"):
            observer.sync()
            begun = begin_checkpoint(
                run.folder,
                setup.engine,
                state,
                carried=stage.memory.tensors() if stage.memory else None,
                write_model=write_model,
                trainer_state=_trainer_state(run, observer, state),
                identity=run.identity,
                frozen=plan.adapter is None or plan.tokenizer.added_rows > 0,
            )

            def finish() -> Path:
                folder = begun.finish()
                if setup.engine.rank == 0:
                    best = state.best.step if _keeps_best(config) and state.best else None
                    retain(run.folder, config.checkpoint.keep, best)
                return folder

            # Ranks agree on a checkpoint by a collective, which must not run beside those of a step.
            beside = writer if setup.engine.world == 1 else None
            return finish() if beside is None else beside.take(finish, begun.size, state)

    return save


def make_schedules(run: Prepared, groups: Collection[str]) -> dict[str, Schedule]:
    """Of each group of parameters: one curve, with the peak of each."""
    first = make_schedule(run.config, run.stage, run.timetable)
    peaks = {CRITIC: run.config.ppo.critic_lr}
    return {name: replace(first, peak=peaks.get(name, first.peak)) for name in groups}


def make_schedule(config: RunConfig, stage: Stage, timetable: Timetable) -> Schedule:
    """Shares become steps: the nearest one, or as transformers' warm-up from 0 has it, the next higher one."""
    optim, total = config.optim, timetable.total_steps
    if isinstance(optim.warmup, Duration):
        warmup = length_in_steps(optim.warmup, timetable.steps_per_epoch, stage.step_tokens)
    else:
        warmup = math.ceil(optim.warmup * total) if optim.warmup_from_zero else round(optim.warmup * total)
    decay = round(optim.decay * total)
    return Schedule(optim.schedule, optim.lr, total, warmup, decay, from_zero=optim.warmup_from_zero)


def _trainer_state(run: Prepared, observer: RunObserver | SilentObserver, state: RunState) -> dict[str, Any]:
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
