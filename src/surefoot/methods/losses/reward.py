"""Losses of reward models: the better of two answers to a prompt should get the higher score (Bradley and Terry 1952).

    last        loss = - log sigmoid(r_b - r_w),  r the value at the last token of an answer (Ouyang et al. 2022)
    divergence  loss = mean over t in [first, end) of - log sigmoid(v_b[t] - v_w[t])  (DeepSpeed-Chat, reward_model.py)
    center      adds c (r_b + r_w)^2, which keeps scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244)

first: the first token in which the two rows differ. end: the end of the longer row. DeepSpeed-Chat finds both ends by
PAD's id, and after the end of the shorter answer it compares with the values of padding. Here the ends are known, so
PAD may be any token, and an answer that has ended keeps the value of its last token. For equal lengths this is the
published loss.

Identical answers carry no information: their loss is log 2, without a gradient.

Shapes: P pairs, T tokens, values [2P, T] with the chosen answers' rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import Batch, PairBatch, in_rows, numbers_on
from surefoot.method_facts.losses import REWARD_LOSSES, joined
from surefoot.methods.own_functions import of_each_pair, own_function
from surefoot.models.shared_prefix import shared_prefixes
from surefoot.report.calibration import CALIBRATION, calibration_sums, right
from surefoot.training.objective import LossSum, Objective


@dataclass(frozen=True)
class Pairs:
    """Values of P pairs.

    better, worse: values of the two rows, [P, T].
    better_lengths, worse_lengths: real tokens of the rows, [P].
    common: length of the common prefix, [P].
    longest: real tokens of the longest row, known on the host without a synchronization.
    """

    better: torch.Tensor  # [P, T]
    worse: torch.Tensor  # [P, T]
    better_lengths: torch.Tensor
    worse_lengths: torch.Tensor
    common: torch.Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.better)

    @property
    def better_score(self) -> torch.Tensor:
        """Value at the last token of each better answer, [P]."""
        return last_scores(self)[0]

    @property
    def worse_score(self) -> torch.Tensor:
        """Value at the last token of each worse answer, [P]."""
        return last_scores(self)[1]

    @property
    def same(self) -> torch.Tensor:
        """[P], True if both rows are identical."""
        return (self.common == self.better_lengths) & (self.common == self.worse_lengths)


PairLoss = Callable[[Pairs, int], torch.Tensor]  # pairs, surplus -> [P]


def reward_objective(loss: str, *, center: float = 0.0, surplus: int = 0, shared: bool = False) -> Objective:
    """Make the loss of a reward model as an objective for `PairBatch`.

    loss: a key of `LOSSES`, or a user's function, pairs -> [P].
    center: coefficient of the centering term, 0 for none.
    surplus: see `divergence_loss`.
    shared: whether to compute the common prefix of a pair once, in padded rows where it saves work; for models that
        allow it.

    Raises InputError if the user's function does not exist.
    """
    compare = LOSSES.get(loss) or _own_loss(loss)
    return partial(_reward_loss, compare=compare, center=center, surplus=surplus, shared=shared)


def _own_loss(named: str) -> PairLoss:
    loss = of_each_pair(own_function(named, "reward.loss"), named, "reward.loss")
    return lambda pairs, surplus: loss(pairs)


def last_loss(pairs: Pairs, surplus: int = 0) -> torch.Tensor:
    """Loss from the scores at the last tokens, [P], wherever the padding is."""
    better, worse = last_scores(pairs)
    return -F.logsigmoid(_without_same(better - worse, pairs.same))


def divergence_loss(pairs: Pairs, surplus: int = 0) -> torch.Tensor:
    """Mean loss over the positions from the first difference to the end of the longer answer (at least one), [P].

    surplus: additional positions after that end, as DeepSpeed-Chat counts them if told of more leading PAD tokens than
        there are.
    """
    longer = torch.maximum(pairs.better_lengths, pairs.worse_lengths)
    first = torch.minimum(pairs.common, longer - 1).unsqueeze(1)  # [P, 1]
    end = longer.unsqueeze(1) + surplus
    at = torch.arange(pairs.longest + surplus, device=longer.device)  # [T']
    margins = _extended(pairs.better, pairs.better_lengths, at) - _extended(
        pairs.worse, pairs.worse_lengths, at
    )  # [P, T']
    losses = -F.logsigmoid(_without_same(margins, pairs.same.unsqueeze(1)))
    inside = (at >= first) & (at < end)
    return (losses * inside).sum(dim=1) / inside.sum(dim=1)


LOSSES: Mapping[str, PairLoss] = joined(
    REWARD_LOSSES,
    {"last": last_loss, "divergence": divergence_loss},
    ("method_facts.losses.REWARD_LOSSES", "methods.losses.reward.LOSSES"),
)


def last_scores(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Values at the last token of the better and of the worse answers, [P] each."""
    better = pairs.better.gather(1, pairs.better_lengths.unsqueeze(1) - 1)
    worse = pairs.worse.gather(1, pairs.worse_lengths.unsqueeze(1) - 1)
    return better.squeeze(1), worse.squeeze(1)


def pairs_of(values: torch.Tensor, batch: PairBatch) -> Pairs:
    """Split the values of a batch by pair.

    values: values of `batch.rows`, [2P, T], or of one packed row, [1, T]. An empty batch has no lengths; any will do,
        as nothing is counted.
    """
    values = in_rows(values, batch.rows)
    count, device = len(batch.common), values.device
    known = batch.rows.lengths or [values.shape[1]] * 2 * count
    lengths, common = numbers_on(device, known), numbers_on(device, batch.common)
    return Pairs(values[:count], values[count:], lengths[:count], lengths[count:], common, max(known, default=0))


def _reward_loss(
    model: nn.Module, batch: PairBatch, *, compare: PairLoss, center: float, surplus: int, shared: bool
) -> LossSum:
    """Summed over pairs.

    model: a `ScoredModel`. sums: reward_accuracy (pairs whose better answer has the higher score at its last token; a
        tie counts half, as in stage dpo), reward_margin between the two, and the scores reward_chosen and
        reward_rejected. In evaluation also the table of `calibration_sums`.
    """
    prefixes = shared_prefixes(batch.rows, batch.common) if shared else None
    read = _last_tokens(batch.rows) if compare is last_loss else None
    pairs = pairs_of(model(batch.rows, prefixes, read), batch)
    loss = compare(pairs, surplus)
    better, worse = last_scores(pairs)
    if center:
        loss = loss + center * (better + worse).square()
    margin = (better - worse).detach()
    sums = {
        "reward_accuracy": right(margin).sum(),
        "reward_margin": margin.sum(),
        "reward_chosen": better.detach().sum(),
        "reward_rejected": worse.detach().sum(),
    }
    tables = {} if torch.is_grad_enabled() else {CALIBRATION: calibration_sums(margin)}
    return LossSum(loss.sum(), sums, tables)


def _last_tokens(rows: Batch) -> torch.Tensor | None:
    """Positions of the last token of each row or document, as flat indices; None for an empty batch without lengths."""
    device, width = rows.input_ids.device, rows.input_ids.shape[1]
    if not rows.lengths:
        return None
    lengths = numbers_on(device, rows.lengths)
    if rows.documents:
        return lengths.cumsum(0) - 1
    return torch.arange(len(lengths), device=device) * width + lengths - 1


def _extended(values: torch.Tensor, lengths: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Values at these positions 0, 1, ..., [P, T']; after an answer's end the value of its last token.

    The last token is read once and spread: a GPU adds the gradients of one that is read at many positions in any order.
    """
    last = values.gather(1, lengths.unsqueeze(1) - 1)
    own = F.pad(values[:, : len(at)], (0, max(0, len(at) - values.shape[1])))
    return torch.where(at < lengths.unsqueeze(1), own, last)


def _without_same(margins: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """Set margins of identical answers to 0 without gradient; dropout could otherwise make them differ."""
    return torch.where(same, torch.zeros_like(margins), margins)
