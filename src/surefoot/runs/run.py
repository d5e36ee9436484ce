"""A training run from start to finish, in the order in which things happen.

Nothing in the run folder is written or replaced until the folder has been inspected, the plan made, the data audited,
and the model loaded and verified. In a multi-rank run the first rank does all of this; the others follow it
(`surefoot.runs.follow`) and take part in the steps (`surefoot.runs.steps`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.interop.tool_log import ToolLog
from surefoot.methods.method import LoadedModels
from surefoot.planning.plan import Origin
from surefoot.report import footer
from surefoot.report.console import Console
from surefoot.report.data_audit import audit_to_json
from surefoot.report.death import LOG, CrashTraces, find_death, resumed_sentence
from surefoot.report.html import draw_report
from surefoot.report.library_messages import captured_libraries
from surefoot.report.log_copies import check_logs, has_copies, mend_logs
from surefoot.report.log_marks import cut_to_marks, require_marks
from surefoot.report.observer import silent_console
from surefoot.report.trainer_log import Row
from surefoot.runs.card_facts import example_picture, example_question
from surefoot.runs.custom import NOTHING, Custom, with_named
from surefoot.runs.faults import device_faults
from surefoot.runs.follow import follow, hand_over, hand_over_end
from surefoot.runs.identity import Digests, check_base, hashed_in_background, record_base
from surefoot.runs.observers import end_facts, find_tool_log, open_observer, open_trackers, run_facts
from surefoot.runs.output_folder import Mode
from surefoot.runs.plan_with_data import is_on_texts
from surefoot.runs.prepare import conflicts, prepare
from surefoot.runs.prepared import PreparedRun, make_task
from surefoot.runs.profiling import NO_PROFILE, START, Phases, ProfileOptions
from surefoot.runs.publish import Published, is_published, publish
from surefoot.runs.requirements import check_several, find_ranks
from surefoot.runs.revisions import HUB, Commits, commits_to_json
from surefoot.runs.rollback import note_rollbacks, roll_back
from surefoot.runs.run_folder import FolderState, inspect_folder, lock_folder, note_changes, reminder, write_records
from surefoot.runs.steps import load_and_check, take_steps
from surefoot.system import hardware
from surefoot.system.errors import STOPPED_EXIT_CODE, Fault, InputError, SurefootError
from surefoot.system.messages import counted
from surefoot.system.redaction import veiled
from surefoot.training.checkpoint import read_state
from surefoot.training.guard import StepsLost
from surefoot.training.loop import Outcome, has_ended
from surefoot.training.session import Session, open_session
from surefoot.training.state import OVERHEADS, RunState

if TYPE_CHECKING:
    from surefoot.interop.translation import Translation

Figures = Callable[[nn.Module, PreTrainedTokenizerBase], Mapping[str, Any]]


@dataclass(frozen=True)
class RunOptions:
    """Options of `train_run` besides the config.

    typed: argv of the command line, for the resume hint; empty when called from Python.
    dry_run: stop before the run folder is written. That a new run may not use it is raised then.
    figures: computes additional metrics of the trained model for all_results.json.
    prompt: the example prompt suggested in the last lines; None takes one from the data.
    custom: the caller's own functions (loss, reward, metrics, ...).
    profile: which steps to profile.
    origin: the other tool's config that this config was translated from; its log lines are printed besides surefoot's.
    commits: the commits that `check_before_torch` resolved hub names to.
    """

    typed: Sequence[str] = ()
    dry_run: bool = False
    figures: Figures | None = None
    prompt: str | None = None
    custom: Custom = NOTHING
    profile: ProfileOptions = NO_PROFILE
    origin: Translation | None = None
    commits: Commits | None = None

    @property
    def tool_log(self) -> ToolLog:
        return find_tool_log(self.origin)


def train_run(config: RunConfig, mode: Mode, console: Console, options: RunOptions = RunOptions()) -> int:
    """Run `config` and return the exit code: 0 finished, 75 stopped and resumable. Raises SurefootError on failure."""
    phases = Phases(hardware.process_seconds() if options.typed else 0.0, console.say)
    options = replace(options, custom=with_named(config, options.custom))
    ranks, launcher = find_ranks(config)
    with CrashTraces() as traces, open_session(ranks, config.parallel.timeout, launcher) as session:
        if not ranks.is_first:
            with silent_console() as silence, captured_libraries(silence):
                while (code := follow(config, session, options.custom, silence, options.profile)) is None:
                    gc.collect()
                return code
        with captured_libraries(console):
            _say(console, options.tool_log.started())
            while (code := _lead_run(config, mode, console, session, options, phases, traces)) is None:
                phases, options = Phases(tell=console.say), replace(options, commits=None)
                mode = "resume"  # the same as if this process had been killed and started again
                gc.collect()  # models are in reference cycles; without this, old and new ones would both be in memory
            return code


def _origin(translation: Translation | None) -> Origin | None:
    if translation is None:
        return None
    from surefoot.interop.translation import said_keys

    return Origin(translation.tool, said_keys(translation))


def _lead_run(
    config: RunConfig,
    mode: Mode,
    console: Console,
    session: Session,
    options: RunOptions,
    phases: Phases,
    traces: CrashTraces,
) -> int | None:
    """Execute the run on rank 0, which owns the run folder.

    Returns the exit code, or None if the run was rolled back to a checkpoint and must be resumed.
    """
    with session.activity.during("planning and reading the data"):
        existing, refused = _inspect(config, mode, options)
        if _is_untouched(existing):
            return _nothing_to_do(existing, console, session)
        if existing.checkpoint is not None:
            require_marks(existing.folder, existing.checkpoint.folder)
        run = prepare(
            config, existing, console, options.custom, options.commits, phases=phases, origin=_origin(options.origin)
        )
    if _is_done(run):
        return _nothing_to_do(run.existing, console, session)
    if options.dry_run:
        steps = counted(run.timetable.total_steps, "step")
        console.say(f"dry run: {steps} planned; nothing was written to {run.folder}")
        if refused:
            raise InputError(refused)
        return hand_over_end(session)
    check_several(config, session.ranks)
    hand_over(session, run)
    # A thread is enough: hashlib releases the GIL, so the files are hashed beside the loading.
    with hashed_in_background(run.base) as hashes:
        run, loaded, verified = load_and_check(run, session, options.custom, console, phases)
        with phases.during("hashes", "hashing the files of the base model"):
            base = hashes()
    if run.resumed:
        check_base(run.folder, run.base, base)
    shares = session.gather("share", {**loaded.share, START: phases.to_json()})
    with lock_folder(run.existing) as rejected:  # nothing in the run folder has changed until here
        _begin_records(
            run,
            loaded,
            console,
            options,
            phases,
            config=config,
            verified=verified,
            base=base,
            shares=shares,
            rejected=rejected,
        )
        session.note_with(partial(_note_error, console))
        try:
            with traces.into(run.folder / LOG), device_faults("training", config, run.plan):
                return _take_steps_and_publish(run, loaded, console, session, options, phases)
        except SurefootError as error:
            if isinstance(error, StepsLost) and _rolled_back(run, error, console):
                # The next attempt loads its models in this process, and two copies would not fit.
                loaded.engine.release()
                session.begin_anew()
                return None
            _note_error(console, str(error))  # run.log only: the command line prints it on the screen
            draw_report(run.folder)
            raise
        finally:
            if session.ranks.world == 1:  # a caller from Python goes on, and would keep the models
                loaded.engine.release()


def _begin_records(
    run: PreparedRun,
    loaded: LoadedModels,
    console: Console,
    options: RunOptions,
    phases: Phases,
    *,
    config: RunConfig,
    verified: Mapping[str, Any],
    base: Digests,
    shares: Sequence[Mapping[str, Any]],
    rejected: Sequence[Path],
) -> None:
    """Write the records that are known before step 1, open run.log, and report what is new since the plan was shown.

    Logs are repaired before anything is appended to them. The last lines of a process that died are read before
    new lines of run.log hide them.

    config: the user's config, with hub branches as given (not yet resolved to commits).
    verified: results of the checks against the plan.
    base: hashes of the base model.
    shares: one entry per rank: its engine and the number of elements it stores.
    rejected: checkpoints that were set aside.
    """
    folder = run.folder
    mended = _mend_logs(run.existing)
    for path in rejected:
        console.say(f"set aside until the run is finished: {path}", style="yellow")
    to_try = {footer.TO_TRY: _to_try(run, options.prompt)}
    records = audit_to_json(run.task.data) | {HUB: commits_to_json(run.commits)} | to_try
    note_changes(run.existing)
    write_records(config, folder, run.plan, verified, records, options.origin, shares)
    record_base(folder, base, anew=not run.resumed)
    death = find_death(folder) if run.existing.mode == "resume" else None
    console.log_to(folder / LOG)
    note_rollbacks(folder)
    for sentence in mended:
        console.say(sentence, style="yellow")
    console.say(phases.sentence())
    if death is not None:
        console.say(resumed_sentence(death, folder, loaded.state.step), style="yellow")
    for line in reminder(run.existing, command=bool(options.typed)):
        console.say(line, style="yellow")
    if options.origin is not None:
        _say(console, options.tool_log.ready(run_facts(run, loaded)))


def _note_error(console: Console, text: str) -> None:
    """Write the error to run.log with secrets masked, which a user's function or a server may have quoted."""
    console.note(f"error: {veiled(text)}")


def _rolled_back(run: PreparedRun, error: StepsLost, console: Console) -> bool:
    config, existing = run.config, run.existing
    if config.guard.rollback == "off":
        return False
    try:
        made = roll_back(existing.folder, make_task(config, run.plan, run.task.data), existing.rollbacks, error)
    except SurefootError as trouble:  # the original error is still reported by the caller
        made = f"guard.rollback: no rollback, because it could not be recorded: {trouble}"
    console.say(made if isinstance(made, str) else made.sentence, style="yellow")
    return not isinstance(made, str)


def _inspect(config: RunConfig, mode: Mode, options: RunOptions) -> tuple[FolderState, Sequence[Fault]]:
    """Inspect the folder. If it is refused, report that together with all conflicts of the config; a dry run of a new
    run, which writes nothing there, gets the faults if there are no conflicts."""
    try:
        return inspect_folder(config, mode), ()
    except InputError as error:
        others = () if mode == "resume" else conflicts(config, options.custom)  # a resumed run keeps its plan
        if others:
            raise InputError([*error.faults, *others]) from None
        if options.dry_run and mode == "new":
            return FolderState(Path(config.output), mode), error.faults
        raise


def _mend_logs(existing: FolderState) -> list[str]:
    """Repair and cut the logs of a resumed run, and return what was wrong. Call it before anything is appended to
    them."""
    places = existing.checkpoint and (existing.folder, existing.checkpoint.folder)
    return [*mend_logs(*places), *cut_to_marks(*places)] if places else []


def _nothing_to_do(existing: FolderState, console: Console, session: Session) -> int:
    """Report that the run is finished. The folder is only locked if one of its logs needs repair."""
    checkpoint = existing.checkpoint
    logs = check_logs(existing.folder, checkpoint.folder) if checkpoint and has_copies(checkpoint.folder) else []
    if checkpoint and any(one.fault for one in logs):
        with lock_folder(existing):
            for sentence in mend_logs(existing.folder, checkpoint.folder):
                console.say(sentence, style="yellow")
    console.say(f"{existing.folder} is finished; nothing to do")
    return hand_over_end(session)


def _is_untouched(existing: FolderState) -> bool:
    """Whether the run has published and its config is the same. What differs is told, what was moved is compared."""
    published = existing.checkpoint is not None and is_published(existing.folder, existing.checkpoint.step)
    return published and not existing.changes


def _is_done(run: PreparedRun) -> bool:
    """Whether the newest checkpoint is at the end of the run and its result is published."""
    checkpoint, stopping = run.existing.checkpoint, run.config.early_stopping
    if checkpoint is None or not is_published(run.folder, checkpoint.step):
        return False
    return has_ended(read_state(checkpoint), run.timetable.total_steps, stopping.patience if stopping else None)


def _take_steps_and_publish(
    run: PreparedRun, loaded: LoadedModels, console: Console, session: Session, options: RunOptions, phases: Phases
) -> int:
    folder, tool_log = run.folder, options.tool_log
    trackers = open_trackers(run.config, folder, loaded.state, console)

    def on_row(row: Row) -> bool:
        lines = tool_log.row(row)
        _say(console, lines)
        trackers.row(row)
        return bool(lines)

    own_loss = options.custom.objective is not None
    with trackers, open_observer(run, loaded, console, on_row, own_loss=own_loss) as observer:
        outcome = take_steps(run, loaded, session, options.custom, observer, trackers.ids, options.profile, phases)
        since = time.perf_counter()
        if outcome.reason != "interrupted":
            trackers.finished()
    if outcome.reason == "interrupted":
        _, cautions = draw_report(folder)
        for caution in cautions:
            console.say(caution, style="yellow")
        command = footer.resume_command(options.typed)
        total = run.timetable.total_steps
        for line in footer.stopped(folder, step=outcome.state.step, total_steps=total, command=command):
            console.say(line)
        return STOPPED_EXIT_CODE
    with loaded.settings.forward():  # in 16 bits an adapter has another type than its base
        more = options.figures(loaded.policy, run.tokenizer) if options.figures else {}
    published = publish(run, loaded, outcome.state, rows=observer.rows, more=more)
    publishing = {"publishing": time.perf_counter() - since}
    here, whole = _durations(outcome.state, loaded.state) | publishing, _durations(outcome.state) | publishing
    _say_the_end(run, outcome, published, options.prompt, here, whole, console)
    _say(console, tool_log.finished(end_facts(run, published)))
    return 0


def _durations(state: RunState, before: RunState | None = None) -> dict[str, float]:
    """Return seconds by activity, since the state `before` or since the run began."""
    before = before or RunState()
    beside = {what: state.beside.get(what, 0.0) - before.beside.get(what, 0.0) for what in OVERHEADS}
    return {footer.STEPS: state.seconds - before.seconds, **beside}


def _spoken(seconds: Mapping[str, float], run: PreparedRun) -> dict[str, float]:
    """The activities as users call them: what a stage with rollouts does for a batch is to answer prompts."""
    answers = run.config.method.rollouts
    return {"rollouts" if answers and what == "batches" else what: spent for what, spent in seconds.items()}


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.say(line)


def _to_try(run: PreparedRun, prompt: str | None) -> dict[str, Any]:
    """Return what the last lines and the report suggest to try. prompt: the caller's prompt, if any."""
    data = run.task.data
    picture = "" if prompt else example_picture(data)
    return {
        "prompt": prompt or (footer.ABOUT_PICTURE if picture else example_question(data)),
        "picture": picture,
        "texts": is_on_texts(data),
        "held_out": run.config.data.eval != "none",
    }


def _say_the_end(
    run: PreparedRun,
    outcome: Outcome,
    published: Published,
    prompt: str | None,
    here: Mapping[str, float],
    whole: Mapping[str, float],
    console: Console,
) -> None:
    for caution in published.cautions:
        console.say(caution, style="yellow")
    state = outcome.state
    lines = footer.finished(
        run.folder,
        published.results,
        step=state.step,
        total_steps=run.timetable.total_steps,
        early=outcome.reason == "early_stopped",
        here=_spoken(here, run),
        whole=_spoken(whole, run),
        best_step=published.step if state.best and state.best.step == published.step else None,
        skipped=state.guard.skipped,
        rollbacks=len(state.rollbacks),
        scores=run.plan.reward is not None,
        **_to_try(run, prompt),
    )
    for line in lines:
        console.say(line)
