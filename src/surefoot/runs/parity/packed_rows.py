"""Packed rows before step 1: the attention that keeps documents apart is put in, if it does.

Some examples of the step that comes next go through the model twice, in padded rows and as a packed row, with loss and
gradients; nothing is dropped and no noise is added, as that would be drawn otherwise. Then one document is changed, and
the others must not move. Whatever else a model does along its rows (a convolution, a state that is carried on) shows
here. Where the two differ by more than rounding, a document is heard by another, or the model loses the documents on
the way, rows are padded, and the plan says so. A resumed run stays with what its plan says, as with every fast path.

This comes before the other fast paths: from here on the batches of the run are what the plan says.

An engine that hands parts of parameters round within the forward pass cannot be asked so: its ranks wait for one
another in the middle. There the model is tried with two short documents while it is still whole
(`models.fast.packing.documents_fault`, by way of `stages.setup`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.batching.subsets import in_padded_rows
from surefoot.methods.method import Setup, Stage
from surefoot.models.fast.packing import NAME, NO_LEAK, packed_attention, reason_of
from surefoot.models.fast.path import FastPath, Undo
from surefoot.models.modes import without_randomness
from surefoot.planning.packing import without_packing
from surefoot.planning.plan import PLAIN, RunPlan
from surefoot.runs.parity.differences import differences
from surefoot.runs.parity.fast_paths import GO_ON, STAYS, Settled, describe_difference, excused, judged
from surefoot.runs.parity.in_fp32 import check_in_fp32, rounds_as_plain
from surefoot.runs.parity.passes import compared_batches, leak_of, nonzero_matrices, one_pass, short_batch
from surefoot.runs.prepared import Prepared
from surefoot.runs.rollback import make_stage
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.failure import is_of_the_environment


def settle_packing(run: Prepared, setup: Setup, say: Callable[[str], None]) -> Settled:
    """Put the attention in and leave it in.

    say: is told where it was taken out, or stays and differs.
    Every rank must ask.

    Raises EnvironmentFault where packing was asked for and differs or fails, and where it fails in a run that goes on.
    """
    plan = setup.plan
    form = plan.kernels.documents.value
    if form == PLAIN:
        return Settled(plan, {})
    resumed = run.resumed
    if setup.packing_fault:
        plan = _without(plan, f"fails on this model ({setup.packing_fault})", say, resumed=resumed)
        return Settled(plan, {NAME: {"form": form, "used": False, "fault": setup.packing_fault}})
    path = packed_attention(form)
    if why := path.obstacle(setup.engine.model):
        plan = _without(plan, f"cannot be used: {why}", say, resumed=resumed)
        return Settled(plan, {NAME: {"used": False, "obstacle": why}})
    undo, trial = _try(run, setup, path, resumed=resumed)
    if trial.fault:
        undo()
        plan = _without(plan, f"fails on this model ({trial.fault})", say, resumed=resumed)
        return Settled(plan, {NAME: {"form": form, "used": False, "fault": trial.fault}})
    leaks = not trial.leak <= NO_LEAK  # what is not a number does, too
    found = trial.record | {"form": form, "leak": trial.leak}
    what = describe_difference(found, "padded rows") if found["outside"] else ""
    if leaks:
        found |= {"used": resumed, "outside": True}
        what = f"lets one document move another by {trial.leak:.2g} of what it moves itself, on this model"
        what = f"{what}; allowed is {NO_LEAK:g}"
    if not found["used"]:
        undo()
        plan = _without(plan, what, say, resumed=resumed)
    elif found["outside"]:
        say(f"data.packing: {form} {what}; {STAYS}")
    return Settled(plan, {NAME: found})


def as_planned(run: Prepared, plan: RunPlan) -> Stage:
    """The stage with its batches as the plan lays them out."""
    same = plan.kernels.documents.value == run.plan.kernels.documents.value
    if same and plan.batch.micro.value == run.plan.batch.micro.value:
        return run.stage
    other = make_stage(run.config, plan, run.stage.data, run.found.rollbacks)
    return replace(run.stage, step_batches=other.step_batches, eval_batches=other.eval_batches)


@dataclass(frozen=True)
class _Trial:
    """record: of the differences to padded rows. leak: see `leak_of`. fault: why there is neither; empty where there
    are."""

    record: dict[str, Any]
    leak: float
    fault: str


def _try(run: Prepared, setup: Setup, path: FastPath, *, resumed: bool) -> tuple[Undo, _Trial]:
    """The path, put in, and what came of it."""
    step = run.timetable.next_step(setup.state.step)
    batches = compared_batches(run.stage, setup.engine, step)
    pad = setup.plan.tokenizer.pad_id
    padded = [in_padded_rows(batch, pad) for batch in batches]
    short = short_batch(run.stage, setup.engine, step)
    seen = check_in_fp32(setup, run.stage, [path], short, in_padded_rows(short, pad), step)
    with without_randomness(setup.engine.model), nonzero_matrices(setup.engine.parameters.values()):
        plain = one_pass(setup, run.stage, padded, step)
        undo = path.install(setup.engine.model)
        moved, fault = leak_of(setup, batches[0].rows)
        if fault:
            return undo, _Trial({}, moved, fault)
        try:
            other = one_pass(setup, run.stage, batches, step)
        except RuntimeError as caught:
            if is_of_the_environment(caught) or (setup.engine.world > 1 and not resumed):
                raise  # other ranks wait in the middle of the pass
            return undo, _Trial({}, moved, reason_of(caught))
        record = judged(differences(setup.engine, plain, other), setup.plan, resumed=resumed) | seen.record(path)
        if seen.wrong:
            record |= {"used": resumed, "outside": True}
        elif record["outside"] and seen.is_right(path):
            undo()
            record = excused(record, rounds_as_plain(setup, run.stage, padded, step, plain, other))
            undo = path.install(setup.engine.model)
    return undo, _Trial(record, moved, "")


def _without(plan: RunPlan, what: str, say: Callable[[str], None], *, resumed: bool) -> RunPlan:
    choice = plan.kernels.documents
    if resumed:
        raise EnvironmentFault(
            Fault("data.packing", f"{choice.value} {what}, and the run began with it", GO_ON, code="SF-FAST-PATH")
        )
    if choice.source == "user":
        raise EnvironmentFault(
            Fault("data.packing", f"{choice.value} {what}", "set data.packing: auto or off", code="SF-FAST-PATH")
        )
    say(f"data.packing: {choice.value} {what}; rows are padded")
    return without_packing(plan, f"{choice.value} {what}", "measured")
