"""Forecast, before step 1, of the disk that a run needs: checkpoints, the one being written, and the trained model.

A checkpoint holds what trains, in fp32, a moving average of it, the optimizer's state, the tokenizer (larger than a
small adapter) and files of some hundred KB; an adapter's holds no base weights. The newest `keep` stay, the best one
besides, and the next is complete before the oldest is deleted. A merged model is compared in a folder of its own before
it is copied into the run's. Logs and plots are some MB and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.memory import BYTES
from surefoot.planning.plan import DType, RunPlan

LEAST_KEPT = 2  # checkpoints, whatever a config says: the newest may be corrupt
_AVERAGES = 2  # copies of a moving average in a checkpoint: to go on from, and as a model to open
_MOMENTS = 8  # bytes of AdamW's state for a parameter: what is offloaded is DeepSpeed's


@dataclass(frozen=True)
class DiskForecast:
    """Bytes, and how many checkpoints lie there at once.

    checkpoints: at most.
    written: surely, while the last of them is being written.
    kept: surely, when the trained model is put beside them.
    """

    checkpoint: int
    checkpoints: int
    model: int
    written: int = 1
    kept: int = 1

    @property
    def least(self) -> int:
        """Without which the run surely cannot end."""
        return max(self.written * self.checkpoint, self.kept * self.checkpoint + self.model)

    @property
    def total(self) -> int:
        return self.checkpoints * self.checkpoint + self.model

    @property
    def further(self) -> DiskForecast:
        """Of a run that goes on: its checkpoints are there already, and one of them makes room for each that comes."""
        return replace(self, checkpoints=min(1, self.checkpoints), written=min(1, self.written), kept=0)


def checkpoints_kept(keep: int) -> int:
    """How many checkpoints stay on the disk: at least two, in case the newest is corrupt.

    keep: `checkpoint.keep` of the config.
    """
    return max(keep, LEAST_KEPT)


def disk_forecast(
    plan: RunPlan,
    keep: int,
    *,
    best: bool,
    saves: int | None = None,
    merged: int = 0,
    averaged: bool = False,
    tokenizer: int = 0,
) -> DiskForecast:
    """How much disk a run needs at most, and how much it surely does.

    keep: of the newest checkpoints.
    best: whether the best one stays besides, which may be one of them.
    saves: how many the run writes, None where nobody knows yet: at least one.
    merged: bytes of the whole model that the run publishes in place of what trains, 0 where it does not.
    averaged: it keeps a moving average of what trains, which is published in the same form.
    tokenizer: bytes of its files, which lie beside every model.
    """
    most = keep + 1 + best
    surely = 1 if saves is None else saves
    policies = 1 + averaged
    tokenizer *= policies + (plan.ppo is not None)  # the critic's
    last = merged or 4 * plan.trainable
    own_folder = merged  # in which the last of them is compared
    return DiskForecast(
        checkpoint=checkpoint_bytes(plan) + _AVERAGES * averaged * 4 * plan.trainable + tokenizer,
        checkpoints=most if saves is None else min(most, saves),
        model=policies * last + own_folder + _critic_bytes(plan) + tokenizer,
        written=min(keep + 1, surely),
        kept=min(keep, surely),
    )


def model_bytes(model: ModelFacts, dtype: DType) -> int:
    """All weights, as a file holds them."""
    return (model.parameters + model.wrapper_parameters) * BYTES[dtype]


def checkpoint_bytes(plan: RunPlan) -> int:
    """Weights that train, in fp32, and the state of their optimizer: of all ranks."""
    moments = plan.memory.optimizer
    if plan.parallel.offload != "none":  # which the forecast of the device does not count
        moments = _MOMENTS * plan.trainable
    elif plan.parallel.zero_stage or plan.parallel.engine.value == "fsdp2":
        moments *= plan.parallel.ranks.value
    return 4 * plan.trainable + _critic_bytes(plan) + moments


def _critic_bytes(plan: RunPlan) -> int:
    """Of stage ppo's, beside the policy."""
    return 4 * plan.ppo.critic_parameters if plan.ppo else 0
