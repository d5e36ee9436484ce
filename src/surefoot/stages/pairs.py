"""What the stages that learn from pairs have in common: which pairs belong to a step, and all of the evaluation set."""

from __future__ import annotations

import numpy as np

from surefoot.config.schema import RunConfig
from surefoot.data.loader import all_pairs, pair_batches
from surefoot.data.order import step_examples, steps_per_epoch
from surefoot.data.prepare import PreparedData
from surefoot.objectives.base import Objective
from surefoot.planning.plan import RunPlan
from surefoot.stages.layout import step_layout, whole_layout
from surefoot.stages.stage import Stage


def pair_stage(objective: Objective, config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """data: pairs, see `surefoot.data.kind`. Sizes of batches count pairs."""
    train, evaluation, size = data.train, data.eval, plan.batch.size.value
    layout, whole = step_layout(plan, data), whole_layout(plan, data)

    def pairs(step: int) -> np.ndarray:
        return step_examples(config.seed, step - 1, data.mixture, size)[1]

    return Stage(
        objective=objective,
        data=data,
        steps_per_epoch=steps_per_epoch(data.mixture.epoch_size, size),
        step_batches=lambda step: pair_batches(train, pairs(step), layout),
        step_tokens=lambda step: int(train.lengths.reshape(-1, 2)[pairs(step)].sum()),
        eval_batches=None if evaluation is None else lambda: all_pairs(evaluation, whole),
    )
