"""Memory again, after a fast path was taken out before step 1: micro-batches were planned for the path that is gone.

The plan is made again with the plain path asked for. Layers are computed again as the model was set up; what can still
give way is the size of micro-batches, which changes no result but by rounding.
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
    """The plan with the forecast of the paths that it has, and smaller micro-batches where that does not fit otherwise.

    settled: the run's plan without the paths that were taken out.
    say: called with a line on smaller micro-batches, or on a forecast that does not fit; the plan keeps it.
    Every rank must ask.
    """
    # A resumed run keeps its micro-batches: others would round otherwise, and it would end in other weights.
    if run.resumed or settled.kernels == run.plan.kernels:
        return settled
    config = as_settled(run.config, settled)
    again = settled.memory.gradient_checkpointing.value
    requested = ("on" if settled.memory.recomputed is None else settled.memory.recomputed) if again else "off"
    config = config.model_copy(update={"gradient_checkpointing": requested})
    anew = make_plan(config, lengths=lengths_of(config, run.task.data), measurements=settled.measurements)
    memory = replace(anew.memory, gradient_checkpointing=settled.memory.gradient_checkpointing)
    batch = _of_the_first_rank(anew.batch, engine)
    # PPO asks for the size where it writes answers, too, and its batches are bound to it.
    if run.config.method.rollouts or batch.micro.value >= settled.batch.micro.value:
        if fits(memory) or not fits(settled.memory):
            return replace(settled, memory=memory)
        room = size_text(usable(memory.available))
        what = (
            f"batch.micro: with the plain path the forecast is {size_text(memory.total)} of {room}; if memory runs out"
        )
        return _with_caution(replace(settled, memory=memory), f"{what}, lower it", say)
    reason = f"{batch.micro.value} instead of {settled.batch.micro.value}, as a fast path was taken out: "
    reason += f"the plain path takes {size_text(memory.total)} so"
    batch = replace(batch, micro=Choice(batch.micro.value, reason, "measured"))
    return _with_caution(replace(settled, memory=memory, batch=batch), f"batch.micro: {reason}", say)


def _of_the_first_rank(batch: BatchPlan, engine: Engine) -> BatchPlan:
    """Ranks take as many forward passes as one another, and machines may differ."""
    own = [batch.micro.value, batch.accumulation, batch.tokens or 0]
    micro, accumulation, tokens = (int(total) for total in engine.totals(own if engine.rank == 0 else [0, 0, 0]))
    return replace(batch, micro=replace(batch.micro, value=micro), accumulation=accumulation, tokens=tokens or None)


def _with_caution(plan: RunPlan, line: str, say: Callable[[str], None]) -> RunPlan:
    say(line)
    return replace(plan, cautions=(*plan.cautions, line))
