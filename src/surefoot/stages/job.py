"""From config, plan and set-up to the loop's job: what is evaluated, how a checkpoint is written, who watches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefoot import hardware
from surefoot.config.durations import Duration
from surefoot.config.schema import RunConfig
from surefoot.evaluate.loss import evaluate_loss
from surefoot.planning.plan import RunPlan
from surefoot.report.console import Console
from surefoot.report.observer import RunObserver
from surefoot.report.rows import trainer_state
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import cut_to_step
from surefoot.stages.setup import Setup
from surefoot.stages.sft import Stage, sample_answers
from surefoot.stages.timetable import Timetable, length_in_steps
from surefoot.training.checkpoint import retain, save_checkpoint
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Job
from surefoot.training.report import EvalReport
from surefoot.training.schedule import Schedule
from surefoot.training.state import RunState


def open_observer(config: RunConfig, run: Path, setup: Setup, timetable: Timetable, console: Console) -> RunObserver:
    """The observer of a fresh or resumed run; rows that lie after the resumed state are cut from the log."""
    state = setup.state
    rows = cut_to_step(run / LOG, state.step, evaluated=state.evaluated == state.step)
    return RunObserver(
        console,
        run,
        total_steps=timetable.total_steps,
        log_every=config.log_every,
        epoch=timetable.epoch,
        peak_memory=lambda: hardware.peak_memory(setup.engine.device.type),
        rows=rows,
        start_step=state.step,
    )


def make_job(
    config: RunConfig,
    plan: RunPlan,
    run: Path,
    stage: Stage,
    setup: Setup,
    timetable: Timetable,
    identity: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    observer: RunObserver,
    stop: StopRequest,
) -> Job:
    """All the loop needs. Evaluating and saving go through here, so that their time is not counted as the step's."""
    keep_best = config.checkpoint.best == "loss"

    def evaluate(step: int) -> EvalReport | None:
        assert stage.eval_batches is not None
        with observer.during("evaluating"):
            report = evaluate_loss(
                setup.model,
                stage.objective,
                stage.eval_batches(),
                step=step,
                settings=setup.settings,
                device=setup.engine.device,
                give_up=lambda: stop.requested is not None,
            )
            if report is not None:
                _answer_samples(step)
        return report

    def _answer_samples(step: int) -> None:
        if config.samples.count and stage.data.eval is not None:
            with torch.no_grad(), setup.settings.forward():
                answers = sample_answers(
                    setup.model,
                    tokenizer,
                    stage.data.eval,
                    stop_ids=stage.data.template.stop_ids,
                    pad_id=plan.tokenizer.pad_id,
                    count=config.samples.count,
                    max_new_tokens=config.samples.max_new_tokens,
                )
            observer.samples(step, answers)

    def save(state: RunState) -> Path:
        with observer.during("saving"):
            observer.sync()
            folder = save_checkpoint(
                run,
                setup.engine,
                state,
                write_model=setup.write_model,
                trainer_state=_trainer_state(config, plan, timetable, observer, state),
                identity=identity,
            )
            retain(run, config.checkpoint.keep, state.best.step if keep_best and state.best else None)
        return folder

    stopping = config.early_stopping
    return Job(
        engine=setup.engine,
        objective=stage.objective,
        batches=stage.step_batches,
        schedule=make_schedule(config, stage, timetable),
        settings=setup.settings,
        total_steps=timetable.total_steps,
        evaluate=evaluate if stage.eval_batches else None,
        eval_steps=timetable.eval_steps,
        save=save,
        save_steps=timetable.save_steps,
        keep_best=keep_best,
        max_consecutive=config.guard.max_consecutive,
        patience=stopping.patience if stopping else None,
        min_delta=stopping.min_delta if stopping else 0.0,
    )


def make_schedule(config: RunConfig, stage: Stage, timetable: Timetable) -> Schedule:
    """Shares become steps. A share is rounded to the nearest step."""
    optim, total = config.optim, timetable.total_steps
    if isinstance(optim.warmup, Duration):
        warmup = length_in_steps(optim.warmup, timetable.steps_per_epoch, stage.step_tokens)
    else:
        warmup = round(optim.warmup * total)
    return Schedule(optim.schedule, optim.lr, total, warmup, decay=round(optim.decay * total))


def _trainer_state(
    config: RunConfig, plan: RunPlan, timetable: Timetable, observer: RunObserver, state: RunState
) -> dict[str, Any]:
    best = state.best
    return trainer_state(
        observer.rows,
        step=state.step,
        total_steps=timetable.total_steps,
        epoch=timetable.epoch(state.step),
        epochs=timetable.epoch(timetable.total_steps),
        total_tokens=state.tokens,
        batch_size=plan.batch.micro.value,
        log_every=config.log_every,
        best_step=best.step if best else None,
        best_loss=best.loss if best else None,
    )
