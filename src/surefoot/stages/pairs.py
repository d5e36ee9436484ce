"""What the stages that learn from pairs have in common: which pairs belong to a step, and all of the evaluation set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from surefoot.config.schema import RunConfig
from surefoot.data.batch import PairBatch
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.loader import pair_batches
from surefoot.data.order import step_examples, steps_per_epoch
from surefoot.data.prepare import PreparedData
from surefoot.objectives.base import Objective
from surefoot.planning.plan import RunPlan
from surefoot.stages.stage import Stage


def pair_stage(objective: Objective, config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """data: pairs, see `surefoot.data.kind`. Sizes of batches count pairs."""
    train, size, micro, pad = data.train, plan.batch.size.value, plan.batch.micro.value, plan.tokenizer.pad_id

    def pairs(step: int) -> np.ndarray:
        return step_examples(config.seed, step - 1, data.mixture, size)[1]

    def step_batches(step: int) -> Sequence[PairBatch]:
        return pair_batches(train, pairs(step), micro, pad)

    def step_tokens(step: int) -> int:
        return int(train.lengths.reshape(-1, 2)[pairs(step)].sum())

    evaluation = data.eval
    return Stage(
        objective=objective,
        data=data,
        steps_per_epoch=steps_per_epoch(data.mixture.epoch_size, size),
        step_batches=step_batches,
        step_tokens=step_tokens,
        eval_batches=None if evaluation is None else lambda: all_pairs(evaluation, micro, pad),
    )


def all_pairs(dataset: TokenisedDataset, micro: int, pad_id: int) -> Iterator[PairBatch]:
    """The pairs of a whole data set as one step, longest first, so that padding is small and memory runs out at once or
    never."""
    count = len(dataset) // 2
    tokens = sum(dataset.supervised(2 * pair) for pair in range(count))
    order = np.argsort(-dataset.lengths.reshape(-1, 2).max(axis=1), kind="stable")
    for start in range(0, count, micro):
        for batch in pair_batches(dataset, order[start : start + micro], micro, pad_id):
            yield replace(batch, answer_share=count / tokens if tokens else 0.0)
