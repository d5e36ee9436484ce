"""Plan memory again after a fast path was removed before step 1: micro-batches were sized for that path.

The plan is made again with the plain path requested. Gradient checkpointing stays as the model was set up; only the
micro-batch size can change, which affects results by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.planning.memory import fits, usable
from surefoot.planning.plan import BatchPlan, Choice, RunPlan
from surefoot.runs.make_plan import make_plan
from surefoot.runs.plan_with_data import as_settled, lengths_of
from surefoot.runs.prepared import PreparedRun
from surefoot.system.messages import size_text
from surefoot.training.engine import Engine


def refit_micro_batches(run: PreparedRun, settled: RunPlan, engine: Engine, say: Callable[[str], None]) -> RunPlan:
    """Return the plan with the memory forecast of its remaining paths, and smaller micro-batches if it does not fit
    otherwise. Collective: every rank must call it.

    settled: the run's plan without the removed paths.
    say: called with a line about smaller micro-batches or a forecast that does not fit; the plan keeps it.
    """
    # A resumed run keeps its micro-batches: other sizes round differently and give different weights.
    if run.resumed or settled.kernels == run.plan.kernels:
        return settled
    config = as_settled(run.config, settled)
    again = settled.memory.gradient_checkpointing.value
    requested = ("on" if settled.memory.recomputed is None else settled.memory.recomputed) if again else "off"
    config = config.model_copy(update={"gradient_checkpointing": requested})
    anew = make_plan(config, lengths=lengths_of(config, run.task.data), measurements=settled.measurements)
    memory = replace(anew.memory, gradient_checkpointing=settled.memory.gradient_checkpointing)
    batch = _of_the_first_rank(anew.batch, engine)
    # PPO also generates with this size, and its batches depend on it.
    if run.config.method.rollouts or batch.micro.value >= settled.batch.micro.value:
        if fits(memory) or not fits(settled.memory):
            return replace(settled, memory=memory)
        room = size_text(usable(memory.available))
        what = (
            f"batch.micro: with the plain path the forecast is {size_text(memory.total)} of {room}; if memory runs out"
        )
        return _with_caution(replace(settled, memory=memory), f"{what}, lower it", say)
    reason = f"{batch.micro.value} instead of {settled.batch.micro.value}, because a fast path was dropped: "
    reason += f"the plain path needs {size_text(memory.total)}"
    batch = replace(batch, micro=Choice(batch.micro.value, reason, "measured"))
    return _with_caution(replace(settled, memory=memory, batch=batch), f"batch.micro: {reason}", say)


def _of_the_first_rank(batch: BatchPlan, engine: Engine) -> BatchPlan:
    """Use the first rank's batch plan: ranks must take the same number of forward passes, and machines may differ."""
    own = [batch.micro.value, batch.accumulation, batch.tokens or 0]
    micro, accumulation, tokens = (int(total) for total in engine.totals(own if engine.rank == 0 else [0, 0, 0]))
    return replace(batch, micro=replace(batch.micro, value=micro), accumulation=accumulation, tokens=tokens or None)


def _with_caution(plan: RunPlan, line: str, say: Callable[[str], None]) -> RunPlan:
    say(line)
    return replace(plan, cautions=(*plan.cautions, line))
