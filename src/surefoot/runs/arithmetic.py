"""What a step of a run has to compute, in numbers: for the share of the machine's limit, and for the guard of speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.data.batch import IGNORE, Weighted
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.limits import NO_WORK, StepFlops, Work, attention_flops, layer_flops, step_flops, work_of
from surefoot.planning.plan import RunPlan

_KNOWN = ("sft", "pretrain", "reward")  # whose step is one forward and one backward pass over its rows, and no more


def step_work(micro_batches: Sequence[Weighted]) -> Work:
    """Of this rank's micro-batches; labels are those of the rows, whatever the batch weighs."""
    return sum(
        (work_of(batch.rows.lengths, int((batch.rows.targets != IGNORE).sum())) for batch in micro_batches),
        start=NO_WORK,
    )


@dataclass(frozen=True)
class Arithmetic:
    """Of the models of a run. stage: as the config names it."""

    model: ModelFacts
    plan: RunPlan
    stage: str

    @property
    def is_whole(self) -> bool:
        """Whether `flops` is all that a step computes: DPO, KTO and PPO run other models beside, or write answers."""
        return self.stage in _KNOWN

    def effort(self, micro_batches: Sequence[Weighted]) -> float:
        """What a forward pass of these batches costs in time, in FLOPs of large products: padding is computed too, and
        the small products of attention run at about a third of their rate."""
        computed = sum(batch.rows.input_ids.numel() for batch in micro_batches)
        squares = sum(length * length for batch in micro_batches for length in batch.rows.lengths)
        return layer_flops(self.model, computed) + 3.0 * attention_flops(self.model, squares, computed)

    def flops(self, work: Work, *, pruned: bool = True) -> StepFlops:
        """pruned: as in `step_flops`."""
        return step_flops(
            self.model,
            work,
            self.plan.adapter,
            head=self.stage != "reward",
            checkpointed=float(self.plan.memory.gradient_checkpointing.value),
            pruned=pruned,
        )
