"""A training run from beginning to end, in the order in which it happens.

Look before touching: the run folder is claimed, the plan made, the data audited, the model loaded and verified, and
only then is anything in the run folder written or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.data.loader import prefetched
from surefoot.dialects.translation import Translation
from surefoot.dialects.voice import Voice
from surefoot.errors import STOPPED_EXIT_CODE, InputError, SurefootError
from surefoot.models.attention import verify_attention
from surefoot.models.bos_check import verify_bos_scaling
from surefoot.models.forward import hidden_states
from surefoot.report import footer
from surefoot.report.capture import captured_libraries
from surefoot.report.console import Console
from surefoot.report.data_audit import audit_to_json
from surefoot.report.html import draw_report
from surefoot.report.rows import Row
from surefoot.stages.card_facts import example_question
from surefoot.stages.custom import NOTHING, Custom, check_objective
from surefoot.stages.evaluating import make_evaluate
from surefoot.stages.job import make_job, open_observer
from surefoot.stages.kinds import KINDS
from surefoot.stages.memory_faults import memory_faults
from surefoot.stages.prepare import Prepared, conflicts, prepare
from surefoot.stages.publish import Published, is_published, publish
from surefoot.stages.records import write_records
from surefoot.stages.revisions import HUB, commits_to_json
from surefoot.stages.run_folder import Claim, Mode, claim, occupy
from surefoot.stages.setup import Setup, set_up
from surefoot.stages.tracking import open_trackers
from surefoot.stages.trained_template import is_on_texts
from surefoot.stages.voices import end_facts, find_voice, run_facts
from surefoot.training.checkpoint import read_state, verify_checkpoint
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Outcome, has_ended, train

Figures = Callable[[nn.Module, PreTrainedTokenizerBase], Mapping[str, Any]]


def train_run(
    config: RunConfig,
    mode: Mode,
    console: Console,
    *,
    typed: Sequence[str],
    dry_run: bool = False,
    figures: Figures | None = None,
    prompt: str | None = None,
    custom: Custom = NOTHING,
    profile_every: int | None = None,
    origin: Translation | None = None,
) -> int:
    """Run `config` and return the exit code: 0 done, 75 stopped and resumable. Raises SurefootError otherwise.

    typed: the words of the command, for the resume hint; none where there was no command.
    dry_run: everything up to the run folder, then stop.
    figures: further figures of the trained model for all_results.json. prompt: one that the last lines offer to try,
    else one of the data's.
    custom: what a Python caller brings of its own.
    profile_every: time forward and backward of every N-th step.
    origin: the words of another tool that the config came from; its log lines are said beside surefoot's.
    """
    voice = find_voice(origin)
    _say(console, voice.started())
    with captured_libraries(console):
        found = _claim(config, mode, custom)
        if _is_untouched(found):
            console.say(f"{found.folder} is finished; nothing to do")
            return 0
        run = prepare(config, found, console, custom)
        if _is_done(run):
            console.say(f"{run.found.folder} is finished; nothing to do")
            return 0
        if dry_run:
            steps = run.timetable.total_steps
            console.say(f"dry run: {steps} steps planned; nothing was written to {run.found.folder}")
            return 0
        with memory_faults("set-up", config, run.plan):
            setup = _set_up(run, console)
            if custom.objective is not None:
                check_objective(config, custom.objective, setup, run.stage)
            own = {"objective": custom.objective_name} if custom.objective else {}
            bos = _verify_bos(run, setup)
            verified = {**setup.verified, **own, **bos, "kernels": _verify_kernels(run, setup)}
        with occupy(run.found) as rejected:
            for folder in rejected:
                console.say(f"set aside until the run is finished: {folder}", style="yellow")
            records = audit_to_json(run.stage.data) | {HUB: commits_to_json(run.commits)}
            write_records(config, run.found.folder, run.plan, verified, records, origin)
            console.log_to(run.found.folder / "run.log")
            if origin is not None:
                _say(console, voice.ready(run_facts(run, setup)))
            try:
                with memory_faults("training", config, run.plan):
                    return _train_and_publish(run, setup, console, typed, figures, prompt, custom, profile_every, voice)
            except SurefootError as error:
                console.note(f"error: {error}")  # the screen gets it from the command line
                draw_report(run.found.folder)
                raise


def _claim(config: RunConfig, mode: Mode, custom: Custom) -> Claim:
    """A folder that is refused is told together with all that the config has against the run."""
    try:
        return claim(config, mode)
    except InputError as error:
        others = () if mode == "resume" else conflicts(config, custom)  # a resumed run keeps its plan
        if not others:
            raise
        raise InputError([*error.faults, *others]) from None


def _is_untouched(found: Claim) -> bool:
    """The run has published its outcome, and nothing that is asked for now changes the training: no need to look on."""
    published = found.checkpoint is not None and is_published(found.folder, found.checkpoint.step)
    return published and all(change.policy == "free" for change in found.changes)


def _is_done(run: Prepared) -> bool:
    """The newest checkpoint stands at the end of the run, and its outcome is published."""
    checkpoint, stopping = run.found.checkpoint, run.config.early_stopping
    if checkpoint is None or not is_published(run.found.folder, checkpoint.step):
        return False
    return has_ended(read_state(checkpoint), run.timetable.total_steps, stopping.patience if stopping else None)


def _set_up(run: Prepared, console: Console) -> Setup:
    """A best checkpoint that does not verify is forgotten before step 1: the next evaluation sets a new one."""
    setup = set_up(run.config, run.plan, run.base, run.tokenizer, run.found.checkpoint)
    best = setup.state.best if run.config.checkpoint.best != "none" else None
    faults = verify_checkpoint(run.found.folder / f"checkpoint-{best.step}") if best else []
    if not faults:
        return setup
    for fault in faults:
        console.say(f"not used: {fault}", style="yellow")
    console.say("the best checkpoint is lost: the next evaluation sets a new one", style="yellow")
    return replace(setup, state=replace(setup.state, best=None))


def _next_rows(run: Prepared, setup: Setup) -> Batch:
    """Of the next step's first micro-batch."""
    step = min(setup.state.step + 1, run.timetable.total_steps)
    return run.stage.step_batches(step)[0].rows.to(setup.engine.device)


def _verify_bos(run: Prepared, setup: Setup) -> dict[str, Any]:
    scale = run.plan.tokenizer.bos_scale.value
    if scale == 1:
        return {}
    with setup.settings.kernels(), setup.settings.forward():
        return {"bos_scale": verify_bos_scaling(setup.policy, _next_rows(run, setup), scale)}


def _verify_kernels(run: Prepared, setup: Setup) -> list[str]:
    """One forward pass, seen by the profiler."""
    rows = _next_rows(run, setup)

    def forward() -> None:
        with setup.settings.kernels(), setup.settings.forward():  # with gradients: which kernel runs can depend on it
            hidden_states(setup.policy, rows)

    return verify_attention(forward, run.plan.attention)


def _train_and_publish(
    run: Prepared,
    setup: Setup,
    console: Console,
    typed: Sequence[str],
    figures: Figures | None,
    prompt: str | None,
    custom: Custom,
    profile_every: int | None,
    voice: Voice,
) -> int:
    config, folder, stage = run.config, run.found.folder, run.stage
    trackers = open_trackers(config, folder, setup.state, console)

    def on_row(row: Row) -> None:
        _say(console, voice.row(row))
        trackers.row(row)

    with (
        trackers,
        open_observer(config, folder, setup, run.timetable, console, on_row) as observer,
        StopRequest() as stop,
        prefetched(stage.step_batches, config.data.workers, last=run.timetable.total_steps) as batches,
    ):
        evaluate = None
        if stage.eval_batches is not None:
            metrics = custom.all_metrics
            evaluate = make_evaluate(config, run.plan, stage, setup, run.tokenizer, metrics, observer, stop)
        start = KINDS[config.stage].start
        if start is not None:
            stage = start(config, run.plan, stage, setup, run.tokenizer)
        stage = replace(stage, step_batches=batches)
        job = make_job(
            config, run.plan, folder, stage, setup, run.timetable, run.identity, evaluate, observer, profile_every
        )
        outcome = train(job, replace(setup.state, trackers=trackers.ids), observer, stop)
        if outcome.reason != "interrupted":
            trackers.finished()
    if outcome.reason == "interrupted":
        _, cautions = draw_report(folder)
        for caution in cautions:
            console.say(caution, style="yellow")
        command = footer.resume_command(typed)
        total = run.timetable.total_steps
        for line in footer.stopped(folder, step=outcome.state.step, total_steps=total, command=command):
            console.say(line)
        return STOPPED_EXIT_CODE
    more = figures(setup.policy, run.tokenizer) if figures else {}
    published = publish(
        config,
        run.plan,
        folder,
        outcome.state,
        rows=observer.rows,
        timetable=run.timetable,
        data=run.stage.data,
        tokenizer=run.tokenizer,
        identity=run.identity,
        more=more,
    )
    _say_the_end(run, outcome, published, prompt, console)
    _say(console, voice.finished(end_facts(run, published)))
    return 0


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.say(line)


def _say_the_end(run: Prepared, outcome: Outcome, published: Published, prompt: str | None, console: Console) -> None:
    for caution in published.cautions:
        console.say(caution, style="yellow")
    state = outcome.state
    lines = footer.finished(
        run.found.folder,
        published.results,
        step=state.step,
        total_steps=run.timetable.total_steps,
        early=outcome.reason == "early_stopped",
        seconds=state.seconds,
        best_step=published.step if state.best and state.best.step == published.step else None,
        skipped=state.guard.skipped,
        prompt=prompt or example_question(run.stage.data),
        texts=is_on_texts(run.stage.data),
    )
    for line in lines:
        console.say(line)
