"""How much disk a run needs, before step 1: checkpoints, the one being written, and the trained model beside them.

A checkpoint holds what trains, in fp32, the optimizer's state and files of some hundred KB; an adapter's holds no base
weights. The newest `keep` stay, the best one besides, and the next is whole before the oldest goes. Logs and plots are
some MB and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.planning.plan import RunPlan

_MOMENTS = 8  # bytes of AdamW's state for a parameter: what is offloaded is DeepSpeed's


@dataclass(frozen=True)
class DiskForecast:
    """Bytes. checkpoints: that lie there at once at most. least: without which no checkpoint can be written."""

    checkpoint: int
    checkpoints: int
    model: int

    @property
    def least(self) -> int:
        return self.checkpoint

    @property
    def total(self) -> int:
        return self.checkpoints * self.checkpoint + self.model


def disk_forecast(plan: RunPlan, keep: int, *, best: bool, saves: int | None = None) -> DiskForecast:
    """keep: of the newest checkpoints. best: whether the best one stays besides. saves: how many the run writes, None
    where nobody knows yet."""
    most = keep + 1 + best
    return DiskForecast(
        checkpoint=checkpoint_bytes(plan),
        checkpoints=most if saves is None else min(most, saves),
        model=4 * plan.trainable,
    )


def checkpoint_bytes(plan: RunPlan) -> int:
    """Weights that train, in fp32, and the state of their optimizer: of all ranks."""
    moments = plan.memory.optimizer
    if plan.parallel.offload != "none":  # which the forecast of the device does not count
        moments = _MOMENTS * plan.trainable
    elif plan.parallel.zero_stage or plan.parallel.engine.value == "fsdp2":
        moments *= plan.parallel.ranks.value
    return 4 * plan.trainable + moments
