"""Load the models, check them against the plan, and take the steps of a run, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import own_batches
from surefoot.data.batching.prefetch import prefetched
from surefoot.data.batching.subsets import in_padded_rows, longest_row
from surefoot.methods.method import LoadedModels, Task
from surefoot.methods.waiting import silence_told
from surefoot.models.attention import verify_attention
from surefoot.models.bos import verify_bos_scaling
from surefoot.models.forward import hidden_states
from surefoot.models.wrapped import attending_to_pictures
from surefoot.planning.plan import RunPlan
from surefoot.report.console import Console
from surefoot.report.observer import RunObserver, SilentObserver
from surefoot.report.record import IN_PYTHON, MEMORY_BEFORE
from surefoot.runs.custom import Custom, check_objective, in_python
from surefoot.runs.evaluating import make_evaluate
from surefoot.runs.failures.recorder import FailureRecorder
from surefoot.runs.faults import device_faults
from surefoot.runs.job import make_job
from surefoot.runs.load_models import load_models
from surefoot.runs.parity.fast_paths import check_fast_paths, try_compiled
from surefoot.runs.plan_with_data import refit_micro_batches
from surefoot.runs.prepared import PreparedRun, make_task, with_models
from surefoot.runs.profiling import COMPILE, Phases, ProfileOptions, arithmetic_of, profiled
from surefoot.runs.slowness import PaceObserver
from surefoot.system.allocator import resident_bytes
from surefoot.training.activity import Activity
from surefoot.training.background import background_writer
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.failure import CurrentBatch
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Observer, Outcome, run_loop
from surefoot.training.session import Session

_FAST_PATHS = "fast_paths"  # key in environment.json, per rank
_LARGE = 16 << 20  # bytes; a thread finishes larger checkpoints, smaller ones take some hundredths of a second


def load_and_check(
    run: PreparedRun, session: Session, custom: Custom, console: Console, phases: Phases | None = None
) -> tuple[PreparedRun, LoadedModels, dict[str, Any]]:
    """Load the models, shard them, and compare them with the plan.

    phases: records how long each part took.

    Returns the run with its final plan (possibly with fewer fast paths) and batches, the models, and the check results
    for plan.json.
    """
    phases = phases or Phases()
    # What a CPU's peak memory holds beside the forecast: Python, the libraries, the data.
    before = {} if run.plan.device.value == "cuda" else {MEMORY_BEFORE: resident_bytes()}
    with session.activity.during("setting up"), device_faults("set-up", run.config, run.plan):
        session.start_group(run.plan.device.value)
        loaded = _set_up(run, session, console, phases)
        if compiled := _try_compiled(run, loaded, console):
            phases.end(COMPILE)
        with phases.during("comparison", "comparing with the plain code"):
            # Before the fast paths: they would be blamed for errors of a custom loss or of BOS scaling.
            own = _verify_objective(run, loaded, custom)
            bos = _verify_bos(run, loaded)
            plan, paths = check_fast_paths(run, loaded, partial(_caution, console))
            kernels = _verify_padded_attention(replace(run, task=_with_batches(run, plan)), loaded)
            plan = refit_micro_batches(run, plan, loaded.engine, partial(_caution, console))
        share = {**loaded.share, **before, **({_FAST_PATHS: paths} if paths else {})}
        verified = {**loaded.verified, **compiled, **own, **bos, "kernels": kernels}
        run = replace(run, plan=plan, task=_with_batches(run, plan))
        return run, replace(loaded, plan=plan, share=share), verified


def _with_batches(run: PreparedRun, plan: RunPlan) -> Task:
    """Rebuild the task's batches for this plan, which may not pack any more or have smaller micro-batches."""
    same = plan.kernels.documents.value == run.plan.kernels.documents.value
    if same and plan.batch.micro.value == run.plan.batch.micro.value:
        return run.task
    other = make_task(run.config, plan, run.task.data, run.existing.rollbacks)
    return replace(run.task, step_batches=other.step_batches, eval_batches=other.eval_batches)


def take_steps(
    run: PreparedRun,
    loaded: LoadedModels,
    session: Session,
    custom: Custom,
    observer: RunObserver | SilentObserver,
    trackers: Mapping[str, str],
    profile: ProfileOptions,
    phases: Phases | None = None,
) -> Outcome:
    """Take the run's steps, with evaluations and checkpoints.

    trackers: run id by tracker.
    phases: durations of this start so far.
    """
    engine, total = loaded.engine, run.timetable.total_steps
    engine.totals([0.0])  # collective: from here on all ranks act on a signal together
    own = own_batches(run.task.step_batches, engine.rank, engine.world)
    with (
        # Entered first and left last: a signal while batches are prefetched or a checkpoint is written must not end the
        # process.
        StopRequest(engine.totals if engine.world > 1 else None) as stop,
        prefetched(own, run.config.data.workers, last=total) as batches,
        background_writer(_LARGE) as writer,
    ):
        with session.activity.during("preparing the first step"):
            run = with_models(replace(run, task=replace(run.task, keep=observer.answers)), loaded, observer.tell)
        stop.gives_up(run.task.give_up)
        evaluate, task, current_batch = None, run.task, CurrentBatch()
        if task.evaluates:
            evaluate = make_evaluate(run, loaded, custom.all_metrics, observer, stop, session.activity, current_batch)
        task = replace(task, step_batches=batches)
        job = make_job(replace(run, task=task), loaded, evaluate, observer, session.activity, writer)
        job = replace(
            job,
            batches=_watched(job.batches, session.activity, observer, rollouts=task.ready is not None),
            recorder=FailureRecorder(run, loaded, observer.caution, current_batch),
        )
        arithmetic = arithmetic_of(run.plan, run.config.stage, run.base)
        listener: Observer = observer
        if engine.rank == 0:
            rollouts = task.ready is not None
            listener = PaceObserver(observer, arithmetic, observer.caution, rollouts=rollouts, alone=engine.world == 1)
            job = listener.watched(job)
        with (
            closing(task),
            silence_told(task.servers, observer.tell),
            profiled(job, profile, arithmetic, run.folder, loaded.state.step, observer) as job,
        ):
            state = replace(loaded.state, trackers=trackers)
            if phases is not None:
                phases.end("first step made ready")
                state = state.spent("set-up", phases.whole - phases.compiling).spent("compile", phases.compiling)
            outcome = run_loop(job, state, listener, stop)
            if outcome.reason != "interrupted":
                task.check_end()
            return outcome


def _watched(
    batches: Callable[[int], Sequence[Weighted]],
    activity: Activity,
    observer: RunObserver | SilentObserver,
    *,
    rollouts: bool,
) -> Callable[[int], Sequence[Weighted]]:
    """Wrap `batches` to report this rank's progress to activity and observer.

    rollouts: whether the model generates before each step, for an unbounded time.
    """

    def watched(step: int) -> Sequence[Weighted]:
        activity.step_begins(step)
        with activity.during("running the model before the step") if rollouts else nullcontext():
            micro_batches = batches(step)
        activity.tick()
        observer.begins(step, [batch.examples for batch in micro_batches])
        return micro_batches

    return watched


def _set_up(run: PreparedRun, session: Session, console: Console, phases: Phases) -> LoadedModels:
    """Load the models. A best checkpoint that fails verification is dropped; the next evaluation sets a new one."""
    with phases.during("model", "loading and checking the model"):
        loaded = load_models(run.config, run.plan, run.base, run.existing.checkpoint, session.ranks, phases)
    loaded = replace(loaded, state=replace(loaded.state, rollbacks=run.existing.rollbacks))
    best = loaded.state.best if run.config.checkpoint.best != "none" else None
    faults = verify_checkpoint(run.folder / f"checkpoint-{best.step}") if best else []
    if not faults:
        return loaded
    for fault in faults:
        console.say(f"not used: {fault}", style="yellow")
    console.say("the best checkpoint is damaged: the next evaluation sets a new one", style="yellow")
    return replace(loaded, state=replace(loaded.state, best=None))


def _next_batch(run: PreparedRun, loaded: LoadedModels) -> Weighted:
    """Return the first micro-batch of the next step."""
    return run.task.step_batches(run.timetable.next_step(loaded.state.step))[0]


def _verify_objective(run: PreparedRun, loaded: LoadedModels, custom: Custom) -> dict[str, Any]:
    if custom.objective is not None:
        check_objective(run.config, custom.objective, loaded, in_padded_rows(_next_batch(run, loaded), _pad(loaded)))
    own = in_python(run.config, custom)
    return {
        **({"objective": custom.objective_name} if custom.objective_name else {}),
        **({IN_PYTHON: own} if own else {}),
    }


def _pad(loaded: LoadedModels) -> int:
    return loaded.plan.tokenizer.pad_id


def _try_compiled(run: PreparedRun, loaded: LoadedModels, console: Console) -> dict[str, Any]:
    if run.plan.compile.value == "off":
        return {}
    return {"compile": try_compiled(run, loaded, console.say, partial(_caution, console))}


def _caution(console: Console, line: str) -> None:
    console.say(f"caution: {line}", style="yellow")


def _verify_bos(run: PreparedRun, loaded: LoadedModels) -> dict[str, Any]:
    """Check BOS scaling in padded rows: packed attention is installed later and compared with these."""
    scale = run.plan.tokenizer.bos_scale.value
    if scale == 1:
        return {}
    rows = in_padded_rows(_next_batch(run, loaded), _pad(loaded)).rows.to(loaded.engine.device)
    with loaded.settings.kernels(), loaded.settings.forward():
        return {"bos_scale": verify_bos_scaling(loaded.policy, rows, scale)}


def _verify_padded_attention(run: PreparedRun, loaded: LoadedModels) -> list[str]:
    """Run one forward pass of a padded row (as in generation) under the profiler. One row only, because more could need
    memory that the steps do not. Packed attention is compared in `check_fast_paths`."""
    rows = longest_row(_next_batch(run, loaded).rows.to(loaded.engine.device))

    def forward() -> None:
        with loaded.settings.kernels(), loaded.settings.forward():  # with gradients, on which the kernel can depend
            hidden_states(loaded.policy, rows)

    return verify_attention(forward, run.plan.attention, attending_to_pictures(loaded.policy))
