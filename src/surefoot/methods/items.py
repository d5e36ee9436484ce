"""A stage that learns from the items of a data set, examples or pairs: which belong to a step, which are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Weighted
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.layout import Layout
from surefoot.data.order import step_examples, steps_per_epoch
from surefoot.data.prepare import PreparedData
from surefoot.methods.layout import step_layout, whole_layout
from surefoot.methods.method import Stage
from surefoot.planning.plan import RunPlan
from surefoot.training.objective import Objective

OfStep = Callable[[TokenisedDataset, np.ndarray, Layout], Sequence[Weighted]]
OfAll = Callable[[TokenisedDataset, Layout], Iterator[Weighted]]


def stage_of_items(
    objective: Objective,
    config: RunConfig,
    plan: RunPlan,
    data: PreparedData,
    of_step: OfStep,
    of_all: OfAll,
) -> Stage:
    """of_step: these items of the training data, in micro-batches; of_all: all of the evaluation data."""
    train, evaluation, size = data.train, data.eval, plan.batch.size.value
    layout, whole = step_layout(plan, data), whole_layout(plan, data)
    lengths = train.lengths.reshape(-1, data.rows_per_item)

    def items(step: int) -> np.ndarray:
        return step_examples(config.seed, step - 1, data.mixture, size)[1]

    return Stage(
        objective=objective,
        data=data,
        steps_per_epoch=steps_per_epoch(data.mixture.epoch_size, size),
        step_batches=lambda step: of_step(train, items(step), layout),
        step_places=lambda step: data.rows_per_item * items(step),
        step_tokens=lambda step: int(lengths[items(step)].sum()),
        eval_batches=None if evaluation is None else lambda: of_all(evaluation, whole),
    )
