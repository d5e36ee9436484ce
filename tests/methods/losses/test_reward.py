"""The losses of a reward model against DeepSpeed-Chat's formula in float64, and what must not move them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.toy_model import ToyModel
from surefoot.data.batching.batch import Batch, Example, PairBatch, collate
from surefoot.methods.losses import reward
from surefoot.methods.losses.reward import divergence_loss, last_loss, pairs_of, reward_objective
from surefoot.models.value_head import ValueHead

EXACT = 1e-12  # float64, a handful of operations
FP32 = 1e-6
PAD = 0


def example(ids: list[int], number: int) -> Example:
    return Example(np.array(ids), np.ones(len(ids), bool), number)


def pair_batch(pairs: list[tuple[list[int], list[int]]], pad: int = PAD) -> PairBatch:
    rows = collate([example(ids, n) for side in (0, 1) for n, ids in enumerate(pair[side] for pair in pairs)], pad)
    return PairBatch(rows, tuple(common(*pair) for pair in pairs), len(pairs))


def common(better: list[int], worse: list[int]) -> int:
    same = [a == b for a, b in zip(better, worse, strict=False)]
    return same.index(False) if False in same else len(same)


def values_for(batch: PairBatch, seed: int = 0) -> torch.Tensor:
    """Drawn, in float64; behind the end of a row the value of its last token."""
    torch.manual_seed(seed)
    values = torch.randn(batch.rows.input_ids.shape, dtype=torch.float64)
    for row, length in enumerate(batch.rows.lengths):
        values[row, length:] = values[row, length - 1]
    return values


def deepspeed_chat(ids: torch.Tensor, values: torch.Tensor, pad: int, num_padding_at_beginning: int) -> list[float]:
    """utils/model/reward_model.py, written out for one pair after the other, without its assertion."""
    count, longest = len(ids) // 2, ids.shape[1]
    losses = []
    for better_ids, worse_ids, better, worse in zip(
        ids[:count], ids[count:], values[:count], values[count:], strict=True
    ):
        ends = []
        for row in (better_ids.tolist(), worse_ids.tolist()):
            pads = [place for place, token in enumerate(row) if token == pad]
            ends.append(pads[num_padding_at_beginning] if len(pads) > num_padding_at_beginning else longest)
        different = [place for place in range(longest) if better_ids[place] != worse_ids[place]]
        first, end = (different[0], max(ends)) if different else (longest - 1, longest)
        margins = [float(better[place] - worse[place]) for place in range(first, end)]
        losses.append(sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins))
    return losses


PAIRS = [
    ([5, 6, 7, 8], [5, 6, 9, 3]),  # two tokens differ
    ([5, 6, 7], [5, 6, 8, 9, 4, 2]),  # the better one is shorter
    ([1, 2, 3, 4, 5, 6, 7], [1, 2]),  # the worse one is a beginning of the better
    ([4, 4], [5, 4]),  # they differ in the first token
]


def test_divergence_is_deepspeed_chats_where_an_ended_answer_keeps_its_value():
    batch = pair_batch(PAIRS)
    values = values_for(batch)
    expected = deepspeed_chat(batch.rows.input_ids, values, PAD, 0)
    assert divergence_loss(pairs_of(values, batch)).tolist() == pytest.approx(expected, rel=EXACT)
    later = replace(pairs_of(values, batch), common=pairs_of(values, batch).common + 1)  # twin
    assert divergence_loss(later).tolist() != pytest.approx(expected, rel=EXACT)


def test_opts_leading_pad_is_counted_by_one_and_a_surplus_counts_positions_behind_the_end():
    """With OPT's BOS in front that is its PAD: the right number is 1; what 2 does there, a surplus of 1 does here."""
    pairs = [([PAD, *better, 9], [PAD, *worse, 9]) for better, worse in PAIRS]
    rows = [ids for pair in zip(*pairs, strict=True) for ids in pair]
    batch = pair_batch(pairs)
    values = values_for(batch)
    ids = torch.nn.functional.pad(batch.rows.input_ids, (0, 3), value=PAD)  # to its max_seq_len
    held = torch.cat([values, values[:, -1:].expand(-1, 3)], dim=1)
    for row, tokens in enumerate(rows):
        held[row, len(tokens) :] = values[row, len(tokens) - 1]
    for asked, surplus in ((1, 0), (2, 1), (3, 2)):
        expected = deepspeed_chat(ids, held, PAD, asked)
        assert divergence_loss(pairs_of(values, batch), surplus).tolist() == pytest.approx(expected, rel=EXACT)
    assert divergence_loss(pairs_of(values, batch), 1).tolist() != pytest.approx(
        deepspeed_chat(ids, held, PAD, 1), rel=EXACT
    )  # twin


def test_last_compares_the_last_tokens():
    batch = pair_batch(PAIRS)
    values = values_for(batch)
    ends = [(values[n, len(b) - 1], values[n + len(PAIRS), len(w) - 1]) for n, (b, w) in enumerate(PAIRS)]
    expected = [math.log1p(math.exp(-float(better - worse))) for better, worse in ends]
    assert last_loss(pairs_of(values, batch)).tolist() == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("loss", ["last", "divergence"])
def test_no_value_behind_the_end_and_no_pad_id_counts(loss):
    compare = reward.LOSSES[loss]
    batch = pair_batch(PAIRS)
    values = values_for(batch)
    found = compare(pairs_of(values, batch), 0)
    other = values.clone()
    for row, length in enumerate(batch.rows.lengths):
        other[row, length:] = 1e6
    assert torch.equal(compare(pairs_of(other, batch), 0), found)
    inside = values.clone()  # twin: the last token's own value does count
    inside[1, 2] += 1
    assert not torch.equal(compare(pairs_of(inside, batch), 0), found)
    end_is_pad = [([5, 6, 7, PAD], [5, 6, 9, 3, PAD])]  # PAD = EOS: it ends both answers, and is their last token
    batch = pair_batch(end_is_pad)
    values = values_for(batch, seed=1)
    margin = float(values[0, 3] - values[1, 4])
    if loss == "last":
        assert float(last_loss(pairs_of(values, batch))) == pytest.approx(math.log1p(math.exp(-margin)), rel=EXACT)
    else:
        wrong = deepspeed_chat(batch.rows.input_ids, values, PAD, 0)[0]  # it loses the last token
        assert float(divergence_loss(pairs_of(values, batch))) != pytest.approx(wrong, rel=EXACT)


@pytest.mark.parametrize("loss", ["last", "divergence"])
def test_identical_answers_are_log_2_without_a_gradient(loss):
    batch = pair_batch([([5, 6, 7], [5, 6, 7]), ([5, 6, 7], [5, 6, 8])])
    values = values_for(batch)
    values[2] += 3.0  # as dropout would, which falls on the rows differently
    values.requires_grad_()
    losses = reward.LOSSES[loss](pairs_of(values, batch), 0)
    losses.sum().backward()
    assert float(losses[0].detach()) == pytest.approx(math.log(2), rel=EXACT)
    assert not values.grad[[0, 2]].any()
    assert values.grad[[1, 3]].any()  # twin: answers that differ have one


class Scores(nn.Module):
    """A backbone and a head that know one token: the toy's hidden layer under a value head."""

    def __init__(self):
        super().__init__()
        self.toy = ToyModel()
        self.v_head = ValueHead(8)
        torch.manual_seed(3)
        nn.init.normal_(self.v_head.summary.weight)

    def forward(self, rows: Batch, prefixes=None, read=None) -> torch.Tensor:
        return self.v_head(torch.tanh(self.toy.hidden(self.toy.embed(rows.input_ids))).cumsum(dim=1))


@pytest.mark.parametrize("loss", ["last", "divergence"])
def test_the_split_into_micro_batches_changes_nothing(loss):
    pairs = [*PAIRS, ([2, 2, 2], [2, 2, 2]), ([1, 9, 9, 9, 9], [1, 3])]
    objective = reward_objective(loss, center=0.1)

    def gradients(split: list[int], by: float) -> tuple[float, torch.Tensor]:
        model, total, start = Scores(), 0.0, 0
        for count in split:
            batch = pair_batch(pairs[start : start + count])
            out = objective(model, batch)
            (out.loss / by).backward()
            total, start = total + float(out.loss.detach()) / by, start + count
        return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradients([6], 6)
    for split in ([1] * 6, [4, 2], [1, 5]):
        found = gradients(split, 6)
        assert found[0] == pytest.approx(whole[0], rel=FP32)
        assert torch.allclose(found[1], whole[1], rtol=FP32, atol=FP32)
    assert gradients([4, 2], 4)[0] != pytest.approx(whole[0], rel=FP32)  # twin: means of means


def test_sums_and_tables():
    batch = pair_batch([([1, 2], [1, 3]), ([1, 4], [1, 5]), ([6, 7], [6, 7])])
    values = torch.tensor([[0, 2.0], [0, -1.0], [0, 0.5], [0, 1.0], [0, -0.5], [0, 0.5]])
    out = reward_objective("last")(lambda *asked: values, batch)
    assert {name: float(value) for name, value in out.sums.items()} == {
        "reward_accuracy": 1.5,  # an equal score counts half
        "reward_margin": 0.5,
        "reward_chosen": 1.5,
        "reward_rejected": 1.0,
    }
    assert not out.tables
    with torch.no_grad():
        table = reward_objective("last")(lambda *asked: values, batch).tables["calibration"]
    assert table.sum(dim=0).tolist()[:2] == [3.0, 1.5]


def test_a_batch_without_weight_runs():
    """What a rank computes so that others need not wait for it."""
    batch = pair_batch(PAIRS).blank()
    out = reward_objective("divergence")(Scores(), batch)
    assert torch.isfinite(out.loss)
