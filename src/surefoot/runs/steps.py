"""The steps of a run, as every rank takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from surefoot.data.batching.batch import Batch, Weighted
from surefoot.data.batching.loader import dealt, prefetched
from surefoot.data.batching.subsets import longest_row
from surefoot.methods.method import Setup
from surefoot.models.attention import verify_attention
from surefoot.models.bos import verify_bos_scaling
from surefoot.models.forward import hidden_states
from surefoot.report.console import Console
from surefoot.report.observer import RunObserver, SilentObserver
from surefoot.runs.custom import Custom, check_objective
from surefoot.runs.evaluating import make_evaluate
from surefoot.runs.failures.recorder import FailureRecorder
from surefoot.runs.faults import device_faults
from surefoot.runs.job import make_job
from surefoot.runs.pace import PaceObserver
from surefoot.runs.parity.compiled import try_compiled
from surefoot.runs.parity.fast_paths import Settled, planned_paths, settle, settle_at_once
from surefoot.runs.parity.packed_rows import as_planned, settle_packing
from surefoot.runs.parity.room import settle_room
from surefoot.runs.prepared import Prepared, with_models
from surefoot.runs.profiling import COMPILE, Phases, ProfileOptions, arithmetic_of, profiled
from surefoot.runs.setup import set_up
from surefoot.training.activity import Activity
from surefoot.training.background import background_writer
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.failure import AtHand
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Observer, Outcome, train
from surefoot.training.session import Session

_FAST_PATHS = "fast_paths"  # key of environment.json, for each rank
_LARGE = 16 << 20  # bytes of a checkpoint that a thread finishes: a smaller one takes some hundredths of a second


def make_ready(
    run: Prepared, session: Session, custom: Custom, console: Console, phases: Phases | None = None
) -> tuple[Prepared, Setup, dict[str, Any]]:
    """The run with the plan that it goes on with, which may have fewer fast paths, and its batches; the models, loaded,
    shared out and held against the plan; and what was found. phases: is told how long each part took."""
    phases = phases or Phases()
    with session.activity.during("setting up"), device_faults("set-up", run.config, run.plan):
        session.start_group(run.plan.device.value)
        setup = _set_up(run, session, console)
        phases.end("model")
        compiled = _try_compiled(run, setup, console)
        if compiled:
            phases.end(COMPILE)
        together = _settle_at_once(run, setup, custom, console)
        setup = together or _settle_packing(run, setup, console)
        before, run = run, replace(run, plan=setup.plan, stage=as_planned(run, setup.plan))
        if custom.objective is not None:
            check_objective(run.config, custom.objective, setup, run.stage)
        own = {"objective": custom.objective_name} if custom.objective else {}
        bos = _verify_bos(run, setup)
        verified = {**setup.verified, **compiled, **own, **bos, "kernels": _verify_kernels(run, setup)}
        setup = setup if together else _settle(run, setup, console)
        plan = settle_room(before, setup.plan, setup.engine, partial(_caution, console))
        phases.end("comparison")
        settled = replace(before, plan=plan, stage=as_planned(before, plan))
        return settled, replace(setup, plan=plan), verified


def take_steps(
    run: Prepared,
    setup: Setup,
    session: Session,
    custom: Custom,
    observer: RunObserver | SilentObserver,
    trackers: Mapping[str, str],
    profile: ProfileOptions,
    phases: Phases | None = None,
) -> Outcome:
    """trackers: under which id each tracker knows the run. phases: of this start, so far."""
    engine, total = setup.engine, run.timetable.total_steps
    engine.totals([0.0])  # from here on a signal is heard on all ranks or on none
    with (
        StopRequest(engine.totals if engine.world > 1 else None) as stop,
        prefetched(run.stage.step_batches, run.config.data.workers, last=total) as batches,
        background_writer(_LARGE) as writer,
    ):
        with session.activity.during("preparing the first step"):
            run = with_models(run, setup, observer.tell)
        evaluate, stage, at_hand = None, run.stage, AtHand()
        if stage.evaluates:
            evaluate = make_evaluate(run, setup, custom.all_metrics, observer, stop, session.activity, at_hand)
        stage = replace(stage, step_batches=lambda step: list(dealt(batches(step), engine.rank, engine.world)))
        job = make_job(replace(run, stage=stage), setup, evaluate, observer, session.activity, writer)
        job = replace(
            job,
            batches=_watched(job.batches, session.activity, observer, rollouts=stage.ready is not None),
            recorder=FailureRecorder(run, setup, observer.caution, at_hand),
        )
        arithmetic = arithmetic_of(run.plan, run.config.stage, run.base)
        listener: Observer = observer
        if engine.rank == 0:
            rollouts = stage.ready is not None
            listener = PaceObserver(observer, arithmetic, observer.caution, rollouts=rollouts, alone=engine.world == 1)
            job = listener.watched(job)
        with profiled(job, profile, arithmetic, run.folder, setup.state.step, observer) as job:
            state = replace(setup.state, trackers=trackers)
            if phases is not None:
                phases.end("first step")
                state = state.spent("set-up", phases.whole - phases.compiling).spent("compile", phases.compiling)
            return train(job, state, listener, stop)


def _watched(
    batches: Callable[[int], Sequence[Weighted]],
    activity: Activity,
    observer: RunObserver | SilentObserver,
    *,
    rollouts: bool,
) -> Callable[[int], Sequence[Weighted]]:
    """With word on how far this rank has come. rollouts: the model runs before the step, for as long as it takes."""

    def told(step: int) -> Sequence[Weighted]:
        activity.step_begins(step)
        with activity.during("running the model before the step") if rollouts else nullcontext():
            found = batches(step)
        activity.tick()
        observer.begins(step, [batch.examples for batch in found])
        return found

    return told


def _set_up(run: Prepared, session: Session, console: Console) -> Setup:
    """A best checkpoint that does not verify is forgotten before step 1: the next evaluation sets a new one."""
    setup = set_up(run.config, run.plan, run.base, run.found.checkpoint, session.ranks)
    setup = replace(setup, state=replace(setup.state, rollbacks=run.found.rollbacks))
    best = setup.state.best if run.config.checkpoint.best != "none" else None
    faults = verify_checkpoint(run.folder / f"checkpoint-{best.step}") if best else []
    if not faults:
        return setup
    for fault in faults:
        console.say(f"not used: {fault}", style="yellow")
    console.say("the best checkpoint is lost: the next evaluation sets a new one", style="yellow")
    return replace(setup, state=replace(setup.state, best=None))


def _next_rows(run: Prepared, setup: Setup) -> Batch:
    """Of the next step's first micro-batch."""
    return run.stage.step_batches(run.timetable.next_step(setup.state.step))[0].rows.to(setup.engine.device)


def _try_compiled(run: Prepared, setup: Setup, console: Console) -> dict[str, Any]:
    if run.plan.compile.value == "off":
        return {}
    return {"compile": try_compiled(run, setup, console.say, partial(_caution, console))}


def _settle_at_once(run: Prepared, setup: Setup, custom: Custom, console: Console) -> Setup | None:
    """None: what is planned has to be looked at one by one. An objective of the caller's own and scaled BOS rows are
    looked at first, so that what is wrong with them is not taken for a fault of a path."""
    if custom.objective is not None or run.plan.tokenizer.bos_scale.value != 1:
        return None
    settled = settle_at_once(run, setup, partial(_caution, console))
    return None if settled is None else _settled(setup, settled)


def _settle_packing(run: Prepared, setup: Setup, console: Console) -> Setup:
    return _settled(setup, settle_packing(run, setup, partial(_caution, console)))


def _settle(run: Prepared, setup: Setup, console: Console) -> Setup:
    settled = settle(
        run.plan,
        setup,
        run.stage,
        planned_paths(run.plan),
        last=run.timetable.total_steps,
        resumed=run.resumed,
        say=partial(_caution, console),
    )
    return _settled(setup, settled)


def _settled(setup: Setup, settled: Settled) -> Setup:
    """With the paths that stay, and what is told of all of them in environment.json."""
    found = {**setup.share.get(_FAST_PATHS, {}), **settled.found}
    share = {**setup.share, _FAST_PATHS: found} if found else setup.share
    return replace(setup, plan=settled.plan, share=share)


def _caution(console: Console, line: str) -> None:
    console.say(f"caution: {line}", style="yellow")


def _verify_bos(run: Prepared, setup: Setup) -> dict[str, Any]:
    scale = run.plan.tokenizer.bos_scale.value
    if scale == 1:
        return {}
    with setup.settings.kernels(), setup.settings.forward():
        return {"bos_scale": verify_bos_scaling(setup.policy, _next_rows(run, setup), scale)}


def _verify_kernels(run: Prepared, setup: Setup) -> list[str]:
    """One forward pass of a row that is not packed, as where answers are written, seen by the profiler. One row, as the
    rest would come before the fast paths do, and need more memory than the steps."""
    rows = longest_row(_next_rows(run, setup))

    def forward() -> None:
        with setup.settings.kernels(), setup.settings.forward():  # with gradients: which kernel runs can depend on it
            hidden_states(setup.policy, rows)

    return verify_attention(forward, run.plan.attention)
