"""The plan of a run that may go on from a checkpoint: what was saved, but for the parts that a change asks for."""

from __future__ import annotations

from dataclasses import replace

from surefoot.config.schema import RunConfig
from surefoot.planning.fast_paths import CUTTING
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.plan import PLAIN, RunPlan
from surefoot.runs.parity.fast_paths import SWITCHED
from surefoot.runs.planned import make_plan
from surefoot.runs.ranks import ranks_facts
from surefoot.runs.run_folder import Claim
from surefoot.system.errors import Fault, InputError

_PLANNED = frozenset({"batch.micro", "gradient_checkpointing"})  # what may change on resume and is part of the plan
_DROPOUT = "model.dropout"  # the same; not every attention kernel can drop out


def plan_of(config: RunConfig, found: Claim, lengths: LengthFacts) -> RunPlan:
    """A resumed run keeps its plan, but for the parts on batch, memory and ranks where a changed key or another number
    of ranks asks for it, and with another dropout those on dropout and attention. A fast path goes where the new
    engine or the new dropout does not allow it."""
    if found.plan is None:
        return make_plan(config, lengths=lengths)
    now, then = ranks_facts(config).world, found.plan.parallel.ranks.value
    keys = {change.key for change in found.changes}
    drops = _DROPOUT in keys
    if not (drops or keys & _PLANNED or any(key.startswith("parallel") for key in keys) or now != then):
        return found.plan
    try:
        anew = make_plan(as_settled(config, found.plan), lengths=lengths, measurements=found.plan.measurements)
    except InputError as error:
        raise InputError([_that_can_be_followed(fault, drops) for fault in error.faults]) from None
    plan = replace(found.plan, batch=anew.batch, memory=anew.memory, parallel=anew.parallel)
    if anew.parallel.engine.value in CUTTING:
        plan = _plain_as(anew, plan, *SWITCHED)
    if drops:
        plan = _plain_as(anew, replace(plan, dropout=anew.dropout, attention=anew.attention), "documents", "last_block")
    return plan


def as_settled(config: RunConfig, plan: RunPlan) -> RunConfig:
    """With the plain paths of the plan asked for, so that the forecast of memory counts on no other."""
    kept = {name: PLAIN for name in SWITCHED if getattr(plan.kernels, name).value == PLAIN}
    asked: dict[str, object] = {"kernels": config.kernels.model_copy(update=kept)}
    if plan.kernels.documents.value == PLAIN:
        asked["data"] = config.data.model_copy(update={"packing": "off"})
    return config.model_copy(update=asked)


def other_kernels(found: Claim, plan: RunPlan) -> list[str]:
    """Which fast paths of the saved plan this one no longer has, and why."""
    if found.plan is None:
        return []
    before, now = found.plan.kernels, plan.kernels
    names = {name: f"kernels.{name}" for name in SWITCHED} | {"documents": "data.packing"}
    return [
        f"{key} was {then.value}, is {choice.value}: {choice.reason}"
        for name, key in names.items()
        if (then := getattr(before, name)).value != (choice := getattr(now, name)).value
    ]


def _plain_as(anew: RunPlan, plan: RunPlan, *names: str) -> RunPlan:
    """The plan with those of its fast paths plain that are plain in the one made anew."""
    gone = {name: choice for name in names if (choice := getattr(anew.kernels, name)).value == PLAIN}
    gone = {name: choice for name, choice in gone.items() if getattr(plan.kernels, name).value != PLAIN}
    return replace(plan, kernels=replace(plan.kernels, **gone))


def _that_can_be_followed(fault: Fault, drops: bool) -> Fault:
    """data.packing and kernels may not change on resume, so what has to give way is the key that did change."""
    if fault.where == "data.packing" and drops:
        return replace(fault, fix=f"leave {_DROPOUT} as it was")
    if fault.where.startswith("kernels."):
        return replace(fault, fix="resume with the engine that the run had")
    return fault
