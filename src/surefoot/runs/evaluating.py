"""One evaluation of a run: loss over the whole evaluation set, metrics on generated answers, sample answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import for_rank
from surefoot.data.prepare import PreparedData
from surefoot.method_facts.methods import WITHOUT_TURNS
from surefoot.methods.method import LoadedModels
from surefoot.models.facts import facts_of
from surefoot.report.observer import RunObserver, SilentObserver
from surefoot.runs.prepared import PreparedRun
from surefoot.system.errors import Fault, InputError
from surefoot.training.activity import Activity
from surefoot.training.evaluation import Answered, Metric, answer_examples, evaluate_loss
from surefoot.training.failure import CurrentBatch
from surefoot.training.interrupt import StopRequest
from surefoot.training.report import EvalReport


def check_answers(config: RunConfig, data: PreparedData) -> None:
    """Raise InputError if answers should be generated but the evaluation data is plain text without prompts."""
    keys = [("metrics.names", bool(config.metrics.names)), ("samples.count", config.samples.count > 0)]
    texts = [one.source.file for one in data.eval_sources if one.source.layout in WITHOUT_TURNS]
    if texts:
        what = f"answers need prompts, but {texts[0]} contains texts without turns"
        fix = "leave it out, or evaluate on records with questions"
        if faults := [Fault(key, what, fix, code="SF-CONFIG-CONFLICT") for key, wanted in keys if wanted]:
            raise InputError(faults)


def make_evaluate(
    run: PreparedRun,
    loaded: LoadedModels,
    metrics: Mapping[str, Metric],
    observer: RunObserver | SilentObserver,
    stop: StopRequest,
    activity: Activity,
    current_batch: CurrentBatch,
) -> Callable[[int], EvalReport | None]:
    """Make the run's evaluation: step -> report, or None if a signal interrupts it.

    run: the run; its task has its models.
    metrics: the metrics that the config may name.
    current_batch: keeps the batch being evaluated, for failure records.

    Each rank evaluates its share of the loss. The few generated answers are computed by every rank in full, so that
    sharded ranks stay in step.
    """
    config, task, engine = run.config, run.task, loaded.engine
    chosen = {name: metrics[name] for name in config.metrics.names}
    positions = facts_of(run.base).max_positions  # a config of Mamba has no such key

    def give_up() -> bool:
        stop.agree()
        return stop.requested is not None

    def answers(count: int | None, max_new_tokens: int) -> Sequence[Answered] | None:
        assert task.data.eval is not None
        with torch.no_grad(), loaded.settings.forward():
            return answer_examples(
                loaded.policy,
                run.tokenizer,
                task.data.eval,
                count=count,
                stop_ids=task.data.template.stop_ids,
                pad_id=run.plan.tokenizer.pad_id,
                max_new_tokens=max_new_tokens,
                positions=positions,
                rows=run.plan.batch.micro.value,
                give_up=give_up,
            )

    def evaluate_by_method(step: int) -> EvalReport | None:
        assert task.evaluate is not None
        with observer.during("evaluating"), activity.during("evaluating"):
            measured = task.evaluate(step, give_up)
            if measured is None:
                return None
            if config.samples.count:
                observer.samples(step, measured.samples[: config.samples.count])
        return measured.report

    def evaluate(step: int) -> EvalReport | None:
        assert task.eval_batches is not None
        started = time.perf_counter()
        with observer.during("evaluating"), activity.during("evaluating"):
            report = evaluate_loss(
                loaded.model,
                task.objective,
                current_batch.each(map(task.eval_ready, for_rank(task.eval_batches(), engine.rank, engine.world))),
                step=step,
                settings=loaded.settings,
                device=engine.device,
                unit=config.method.unit,
                give_up=give_up,
                totals=engine.totals,
            )
            if report is not None and chosen:
                answered = answers(config.metrics.examples, config.metrics.max_new_tokens)
                report = None if answered is None else _with_metrics(report, chosen, answered, started, observer)
            if report is not None and config.samples.count:
                samples = answers(config.samples.count, config.samples.max_new_tokens) or ()
                observer.samples(step, [(one.prompt, one.answer) for one in samples])
        return report

    return evaluate if task.evaluate is None else evaluate_by_method


def _with_metrics(
    report: EvalReport,
    metrics: Mapping[str, Metric],
    answered: Sequence[Answered],
    started: float,
    observer: RunObserver | SilentObserver,
) -> EvalReport:
    """Add the metrics. One that raises becomes NaN with a warning: it must not end hours of training."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            found[name] = float(metric(answered))
        except Exception as error:  # user code may raise anything
            found[name] = math.nan
            observer.caution(f"metric {name} after step {report.step}: {type(error).__name__}: {error}")
    return replace(report, metrics={**report.metrics, **found}, seconds=time.perf_counter() - started)
