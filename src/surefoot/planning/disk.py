"""Forecast, before step 1, the disk space that a run needs: checkpoints, the one being written, and the final model.

A checkpoint contains the trained weights in fp32, their moving average if there is one, the optimizer state, the
tokenizer (larger than a small adapter) and some hundred KB of other files; an adapter's contains no base weights. The
newest `keep` and the best one are kept, and a new one is complete before the oldest is deleted. A merged model is
verified in its own folder before it is copied to the run's. Logs and plots (some MB) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.memory import BYTES
from surefoot.planning.plan import ZERO, DType, RunPlan

LEAST_KEPT = 2  # minimum number of checkpoints, because the newest may be corrupt
_AVERAGES = 2  # copies of a moving average in a checkpoint: for resuming, and as a loadable model
_MOMENTS = 8  # bytes of AdamW state per parameter, for optimizers offloaded by DeepSpeed


@dataclass(frozen=True)
class DiskForecast:
    """Sizes in bytes, and numbers of checkpoints on disk at the same time.

    checkpoints: at most.
    written: at least, while the last of them is being written.
    kept: at least, when the final model is written.
    """

    checkpoint: int
    checkpoints: int
    model: int
    written: int = 1
    kept: int = 1

    @property
    def least(self) -> int:
        """Minimum without which the run cannot finish."""
        return max(self.written * self.checkpoint, self.kept * self.checkpoint + self.model)

    @property
    def total(self) -> int:
        return self.checkpoints * self.checkpoint + self.model

    @property
    def further(self) -> DiskForecast:
        """The forecast of a resumed run: its checkpoints exist already, and one is deleted for each new one."""
        return replace(self, checkpoints=min(1, self.checkpoints), written=min(1, self.written), kept=0)


def checkpoints_kept(keep: int) -> int:
    """Number of checkpoints that stay on disk: at least two, in case the newest is corrupt.

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
    """Forecast the maximum and minimum disk space of a run.

    keep: number of newest checkpoints to keep.
    best: whether the best checkpoint is kept too; it may be one of the newest.
    saves: number of checkpoints that the run writes; None if not known yet (at least one).
    merged: bytes of the merged model that is published instead of the adapter; 0 if it is not.
    averaged: whether a moving average of the trained weights is kept and published in the same form.
    tokenizer: bytes of the tokenizer files, which are saved with every model.
    """
    most = keep + 1 + best
    surely = 1 if saves is None else saves
    policies = 1 + averaged
    tokenizer *= policies + (plan.ppo is not None)  # one for the critic
    last = merged or _trained_bytes(plan)
    own_folder = merged  # the folder in which it is verified
    return DiskForecast(
        checkpoint=checkpoint_bytes(plan) + _AVERAGES * averaged * 4 * plan.trainable + tokenizer,
        checkpoints=most if saves is None else min(most, saves),
        model=policies * last + own_folder + _critic_bytes(plan) + tokenizer,
        written=min(keep + 1, surely),
        kept=min(keep, surely),
    )


def model_bytes(model: ModelFacts, dtype: DType) -> int:
    """Bytes of all weights in a file."""
    return (model.parameters + model.wrapper_parameters) * BYTES[dtype]


def checkpoint_bytes(plan: RunPlan) -> int:
    """Bytes of the fp32 trained weights and their optimizer state, over all ranks."""
    moments = plan.memory.optimizer
    if plan.parallel.offload != "none":  # not in the device's forecast
        moments = _MOMENTS * plan.trainable
    elif plan.parallel.zero_stage or plan.parallel.engine.value == "fsdp2":
        moments *= plan.parallel.ranks.value
    return _trained_bytes(plan) + _critic_bytes(plan) + moments


def _trained_bytes(plan: RunPlan) -> int:
    """Bytes of the trained weights in fp32; an adapter that starts from the base's weights has its first values too."""
    return 4 * plan.trainable * (2 if plan.adapter and plan.adapter.start != ZERO else 1)


def _critic_bytes(plan: RunPlan) -> int:
    """Bytes of the critic in stage ppo."""
    return 4 * plan.ppo.critic_parameters if plan.ppo else 0
