"""What the planner wants to know of the examples before it chooses kernels and micro-batches: their lengths, and how
many tokens each way to lay them out sends through the model. All of it is counted, over some steps drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Example
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.layout import Layout
from surefoot.data.loader import common_beginning
from surefoot.data.prepare import PreparedData
from surefoot.models.shared_prefix import tokens_with_shared
from surefoot.planning.measurements import LengthFacts

_MIX = 32  # lengths that stand for all
_ROOM = 4096  # tokens of a padded micro-batch, where its size is left open; the share of padding depends on it little
_TYPICAL = 90  # percentile: about the longest of the ten or so examples of a micro-batch
_STEPS = 64  # drawn


@dataclass(frozen=True)
class StepTokens:
    """real: of the examples. padded: in padded rows. shared: the same, what pairs begin with computed once."""

    real: int
    padded: int
    shared: int


def lengths_of(config: RunConfig, data: PreparedData) -> LengthFacts:
    """Of the run's examples, with what the policy is yet to write behind them."""
    answer = config.ppo.max_new_tokens if config.stage == "ppo" else 0
    return length_facts(data, answer, size=config.batch.size, micro=config.batch.micro)


def length_facts(
    data: PreparedData, answer: int = 0, *, size: int = 16, micro: int | Literal["auto"] = "auto"
) -> LengthFacts:
    """answer: tokens that are yet to be written behind each example, all of which carry loss. size, micro: as in the
    config, of which the share of padding depends."""
    train = data.train
    longest, typical = int(train.lengths.max()), int(np.percentile(train.lengths, _TYPICAL, method="higher"))
    supervised = float((train.supervised_counts / train.lengths).max())
    if answer:
        supervised = answer / (longest + answer)
    quantiles = (np.arange(_MIX) + 0.5) / _MIX
    mix = np.quantile(train.lengths, quantiles, method="nearest")
    per = data.rows_per_item
    layout = Layout(0, tokens=max(_ROOM, longest * per)) if micro == "auto" else Layout(0, most=micro)
    tokens = step_tokens(train, per, size, layout)
    return LengthFacts(
        longest=longest + answer,
        typical=typical + answer,
        supervised=supervised,
        mean=float(train.lengths.mean()) + answer,
        mix=tuple(int(length) + answer for length in mix),
        padding=1 - tokens.real / tokens.padded,
        shared=tokens.shared / tokens.padded,
        evaluated=int(data.eval.lengths.max()) if data.eval is not None else 0,
    )


def step_tokens(train: TokenisedDataset, per: int, size: int, layout: Layout, *, seed: int = 0) -> StepTokens:
    """Over random steps of `size` items, of `per` examples each: two in pairs. layout: of padded rows."""
    generator = np.random.default_rng(seed)
    lengths = train.lengths.reshape(-1, per)
    real = padded = shared = 0
    for _ in range(_STEPS):
        own = generator.choice(len(lengths), min(size, len(lengths)), replace=False)
        real += int(lengths[own].sum())
        for group in layout.groups(lengths[own].tolist()):
            items = own[group]
            rows = lengths[items].T.flatten().tolist()  # the better answers' first
            padded += len(rows) * max(rows)
            common = [common_beginning(*_both(train, int(item))) for item in items] if per == 2 else []
            shared += tokens_with_shared(rows, common) if common else len(rows) * max(rows)
    return StepTokens(real, padded, shared)


def _both(train: TokenisedDataset, pair: int) -> Sequence[Example]:
    return train[2 * pair], train[2 * pair + 1]
