"""Consumers of a run's rows besides its log: the console, trackers, and the log format of another tool."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from surefoot.config.load import plain_config
from surefoot.config.schema import RunConfig
from surefoot.interop.tool_log import NO_LINES, End, RunFacts, ToolLog
from surefoot.methods.method import LoadedModels
from surefoot.models.forward import causal_model
from surefoot.report.console import Console
from surefoot.report.events import append_event
from surefoot.report.observer import RunObserver
from surefoot.report.trackers.adapters import RunFacts as TrackedRun
from surefoot.report.trackers.adapters import flat_config, make_trackers
from surefoot.report.trackers.fan_out import Trackers
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import Row, cut_to_step
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.publish import Published
from surefoot.system import hardware, process
from surefoot.training.state import RunState

if TYPE_CHECKING:
    from surefoot.interop.translation import Translation


def open_trackers(config: RunConfig, run: Path, state: RunState, console: Console) -> Trackers:
    """Create the trackers; entering the context starts them. state: where the run resumes, with earlier tracker ids."""
    if config.report_to:
        process.refuse_telemetry()

    def say(text: str) -> None:
        console.say(text, style="yellow")
        append_event(run, "tracker", state.step, text)

    facts = TrackedRun(
        run=run,
        project=config.tracking.project,
        name=config.tracking.name or run.resolve().name,
        offline=config.tracking.offline,
        config=flat_config(plain_config(config)),
        step=state.step,
        run_id=None,
    )
    requested = {name: one for name, one in state.trackers.items() if name in config.report_to}
    return Trackers(make_trackers(config.report_to), facts, requested, say)


def find_tool_log(origin: Translation | None) -> ToolLog:
    """Return the tool's log lines; without a translation there are none, and no dialect is imported."""
    if origin is None:
        return NO_LINES
    from surefoot.interop.registry import log_of

    return log_of(origin)


def run_facts(run: PreparedRun, loaded: LoadedModels) -> RunFacts:
    plan, example = run.plan, run.task.data.train[0]
    ids, learned = tuple(example.ids.tolist()), tuple(example.supervised.tolist())
    answer = [token for token, counts in zip(ids, learned, strict=True) if counts]
    return RunFacts(
        config=run.config,
        embedding=_embedding_name(loaded.policy),
        bos=plan.tokenizer.bos_id,
        pad=plan.tokenizer.pad_token.value,
        pad_id=plan.tokenizer.pad_id,
        added_rows=plan.tokenizer.added_rows,
        base=plan.precision.base.value,
        compute=plan.precision.compute.value,
        attention=plan.attention.implementation.value,
        device=plan.device.value,
        ids=ids,
        learned=learned,
        text=str(run.tokenizer.decode(list(ids))),
        answer=str(run.tokenizer.decode(answer)),
    )


def end_facts(run: PreparedRun, published: Published) -> End:
    folder = run.folder
    return End(str(folder), frozenset(path.name for path in folder.iterdir()), published.results)


def _embedding_name(model: nn.Module) -> str:
    wanted = causal_model(model).get_input_embeddings()
    return next((name for name, module in model.named_modules() if module is wanted), "")


def open_observer(
    run: PreparedRun,
    loaded: LoadedModels,
    console: Console,
    on_row: Callable[[Row], bool] | None = None,
    *,
    own_loss: bool = False,
) -> RunObserver:
    """Open the observer of a new or resumed run; log rows after the resumed state are cut.

    own_loss: whether the user's function replaces the stage's loss.
    """
    state = loaded.state
    rows = cut_to_step(run.folder / LOG, state.step, evaluated=state.evaluated == state.step)
    method, tokens = run.config.method, causal_model(loaded.policy).config.get_text_config().vocab_size
    guesses = method.learns_tokens and not method.teacher and not own_loss
    return RunObserver(
        console,
        run.folder,
        total_steps=run.timetable.total_steps,
        log_every=run.config.log_every,
        epoch=run.timetable.epoch,
        peak_memory=lambda: hardware.peak_memory(loaded.engine.device.type),
        rows=rows,
        start_step=state.step,
        on_row=on_row,
        unit=run.config.method.unit,
        seed=run.config.seed,
        guess=math.log(tokens) if guesses else math.inf,
    )
