"""Losses of pairs of answers: DPO and its relatives.

With c and r the chosen and the rejected answer, log p of the policy, log q of the reference, |y| the number of tokens
of an answer, d = (log p(c) - log q(c)) - (log p(r) - log q(r)) and s the logistic function, a pair's loss is

    sigmoid   -(1 - e) log s(b d) - e log s(-b d)       DPO, Rafailov et al. 2023; e: label smoothing, Mitchell 2023
    hinge     max(0, 1 - b d)                           SLiC-HF, Zhao et al. 2023
    ipo       (d' - 1 / 2b)^2                           Azar et al. 2023; d' is d with each answer's part over its |y|
    sigmoid_norm   -log s(b d')
    robust    (-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2e)     Chowdhury et al. 2024
    exo_pair  s(b d) log(s(b d) / (1 - e)) + s(-b d) log(s(-b d) / e)     Ji et al. 2024
    discopop  (1 - w) (-log s(b d)) + w exp(-b d), w = s(b d / 0.05)     Lu et al. 2024
    simpo     -log s(b (log p(c)/|c| - log p(r)/|r|) - m)          Meng et al. 2024; m: margin
    orpo      -b log s(log odds(c) - log odds(r)), odds = P / (1 - P), log P = log p(y) / |y|     Hong et al. 2024
    cpo       -(1 - e) log s(b h) - e log s(-b h), h = log p(c) - log p(r)     Xu et al. 2024

or, with C = log p(c) - log q(c) and R = log p(r) - log q(r), each answer against the reference:

    nca_pair  -log s(b C) - log s(-b C) / 2 - log s(-b R) / 2     Chen et al. 2024
    bco_pair  -log s(b C) - log s(-b R)                           Jung et al. 2024, without its moving threshold
    sppo_hard (C - 1 / 2b)^2 + (R + 1 / 2b)^2                     Wu et al. 2024, with probabilities 1 and 0
    apo_zero  1 - s(b C) + s(b R)                                 D'Oosterlinck et al. 2024
    apo_down  s(b C) + 1 - s(b (C - R))                           the same

plus `sft` times the cross entropy of the chosen answers, a mean over all their tokens in the optimizer step, or with
`prompts` also over those of their prompts, as in TRL's ORPO. ORPO and CPO include it with weight 1 by definition. A
loss is a row of LOSSES and a row of facts, never a branch.

`sums` contain the rewards that a loss implies: b times log p/q of an answer or, without a reference, b log p / |y|
(orpo, simpo) or b log p (cpo). reward_accuracy counts pairs whose chosen answer has the higher reward; a tie, as for
every pair before step 1, counts one half (TRL counts 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import PairBatch
from surefoot.method_facts.losses import NO_REFERENCE, PAIR_LOSSES, LossFacts, joined, keys_of
from surefoot.methods.losses.logprobs import AnswerLogProbs, answer_logprobs
from surefoot.methods.own_functions import of_each_pair
from surefoot.training.objective import LossSum, Objective


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities and token counts of P pairs, each [P].

    chosen, rejected: log-probabilities under the policy.
    chosen_reference, rejected_reference: the same under the reference; None for a loss without one.
    chosen_tokens, rejected_tokens: tokens of each answer, fp32.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_reference: torch.Tensor | None
    rejected_reference: torch.Tensor | None
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def chosen_ratio(self) -> torch.Tensor:
        return _ratio(self.chosen, self.chosen_reference)

    @property
    def rejected_ratio(self) -> torch.Tensor:
        return _ratio(self.rejected, self.rejected_reference)

    @property
    def chosen_mean(self) -> torch.Tensor:
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> torch.Tensor:
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True)
class Constants:
    """Constants of the formulas above, named as in the config's `alignment`. Those of single losses have a default.

    beta: b above.
    label_smoothing: e, for sigmoid, robust, exo_pair and cpo.
    margin: m, for simpo.
    """

    beta: float
    label_smoothing: float = 0.0
    margin: float = 0.0


PerPair = Callable[[Pairs, Constants], torch.Tensor]
Rewards = Callable[[Pairs, Constants], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PairLoss:
    """Formulas of one loss; its facts are a row of `surefoot.method_facts.losses.PAIR_LOSSES`.

    loss: loss of each pair, [P].
    rewards: implied rewards of the chosen and the rejected answers, [P] each.
    """

    loss: PerPair
    rewards: Rewards


def preference_loss(name: str, constants: Constants, sft: float = 0.0, *, prompts: bool = False) -> Objective:
    """Make the objective of one of LOSSES, for PairBatch.

    name: name of the loss.
    constants: its constants.
    sft: weight of the cross entropy of the chosen answers, in addition to the loss's own.
    prompts: whether it counts their prompts too.
    """
    return pair_objective(LOSSES[name], PAIR_LOSSES[name], constants, sft, prompts=prompts)


def own_loss(loss: PerPair, name: str, facts: LossFacts) -> PairLoss:
    """Make a pair loss from a user's function. Its rewards are DPO's, or SimPO's without a reference.

    loss: (pairs, constants) -> [P].
    name: its name in the config, for errors.
    facts: whether it has a reference.
    """

    fix = "" if facts.reference else f"alignment.reference is {NO_REFERENCE}: there are no ratios to a reference"
    checked = of_each_pair(loss, name, "alignment.loss", when_it_raises=fix)
    return PairLoss(checked, _over_reference if facts.reference else _per_token)


def pair_objective(
    row: PairLoss, facts: LossFacts, constants: Constants, sft: float, *, prompts: bool = False
) -> Objective:
    """Make the objective of a loss, for PairBatch; arguments as in `preference_loss`."""
    weight = facts.sft + sft

    def objective(model: nn.Module, batch: PairBatch) -> LossSum:
        """Summed over pairs. `batch.reference` must be set if the loss needs it."""
        found = answer_logprobs(model, batch.rows, also=len(batch.common) if prompts else 0)
        pairs = _pairs(found, batch, facts.reference)
        loss = row.loss(pairs, constants).sum()
        if weight:  # the step divides by its pairs; the share turns the sum over tokens into a mean over the step's
            share, learned = (batch.row_share, found.also) if prompts else (batch.answer_share, pairs.chosen)
            loss = loss - weight * share * learned.sum()
        with torch.no_grad():
            return LossSum(loss, _sums(pairs, row.rewards(pairs, constants)))

    return objective


def _pairs(found: AnswerLogProbs, batch: PairBatch, needs_reference: bool) -> Pairs:
    count, tokens = len(batch.common), found.tokens.clamp(min=1)
    pairs = Pairs(found.sums[:count], found.sums[count:], None, None, tokens[:count], tokens[count:])
    if not needs_reference:
        return pairs
    if batch.reference is None:
        raise ValueError("this loss compares with a reference, and the batch has none of its log-probabilities")
    return replace(pairs, chosen_reference=batch.reference[:count], rejected_reference=batch.reference[count:])


def _ratio(policy: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    if reference is None:
        raise ValueError("the loss compares with a reference, and there is none")
    return policy - reference


def _sums(pairs: Pairs, rewards: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    chosen, rejected = rewards
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    found = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_accuracy": right,
        "reward_margin": chosen - rejected,
        "logp_chosen": pairs.chosen,
        "logp_rejected": pairs.rejected,
    }
    return {name: values.detach().sum() for name, values in found.items()}


def _sigmoid(pairs: Pairs, constants: Constants) -> torch.Tensor:
    return _smoothed(constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio), constants.label_smoothing)


def _smoothed(scaled: torch.Tensor, smoothing: float) -> torch.Tensor:
    # Not log(sigmoid(x)): in fp32 sigmoid is 0 below -104, and its logarithm would be infinite.
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def _hinge(pairs: Pairs, constants: Constants) -> torch.Tensor:
    return torch.relu(1 - constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def _ipo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """Per token, as the paper's authors confirmed to TRL: a sum would grow with the answers' lengths."""
    return (_of_means(pairs) - 1 / (2 * constants.beta)) ** 2


def _of_means(pairs: Pairs) -> torch.Tensor:
    return pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens


def _sigmoid_norm(pairs: Pairs, constants: Constants) -> torch.Tensor:
    return -F.logsigmoid(constants.beta * _of_means(pairs))


def _robust(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """Unbiased where a share e of the labels is swapped: the mean over the swap is DPO's loss of the right label."""
    scaled, flipped = constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio), constants.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(scaled) + flipped * F.logsigmoid(-scaled)) / (1 - 2 * flipped)


def _exo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """KL from the policy's preference to one that is wrong with probability e > 0."""
    scaled, wrong = constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio), constants.label_smoothing
    chosen = torch.sigmoid(scaled) * (F.logsigmoid(scaled) - math.log1p(-wrong))
    return chosen + torch.sigmoid(-scaled) * (F.logsigmoid(-scaled) - (math.log(wrong) if wrong else -math.inf))


_DISCOPOP_TAU = 0.05  # the paper's, and TRL's default


def _discopop(pairs: Pairs, constants: Constants) -> torch.Tensor:
    scaled = constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    share = torch.sigmoid(scaled / _DISCOPOP_TAU)
    return -F.logsigmoid(scaled) * (1 - share) + torch.exp(-scaled) * share


def _nca(pairs: Pairs, constants: Constants) -> torch.Tensor:
    chosen, rejected = _over_reference(pairs, constants)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco(pairs: Pairs, constants: Constants) -> torch.Tensor:
    chosen, rejected = _over_reference(pairs, constants)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    goal = 0.5 / constants.beta
    return (pairs.chosen_ratio - goal) ** 2 + (pairs.rejected_ratio + goal) ** 2


def _apo_zero(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """For answers better than the model's own: the chosen one gains, the rejected one loses."""
    chosen, rejected = _over_reference(pairs, constants)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """For answers worse than the model's own: both lose, the rejected one more."""
    chosen, rejected = _over_reference(pairs, constants)
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def _cpo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    """DPO's loss with a uniform reference, which cancels in the difference."""
    return _smoothed(constants.beta * (pairs.chosen - pairs.rejected), constants.label_smoothing)


def _simpo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    return -F.logsigmoid(constants.beta * (pairs.chosen_mean - pairs.rejected_mean) - constants.margin)


def _orpo(pairs: Pairs, constants: Constants) -> torch.Tensor:
    odds = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
    return -constants.beta * F.logsigmoid(odds)


def _log_odds(logp: torch.Tensor) -> torch.Tensor:
    """log(P / (1 - P)) from log P < 0. 1 - P is computed with expm1, which is accurate for P near 1; P is limited to
    the largest fp32 value below 1."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


def _over_reference(pairs: Pairs, constants: Constants) -> tuple[torch.Tensor, torch.Tensor]:
    return constants.beta * pairs.chosen_ratio, constants.beta * pairs.rejected_ratio


def _per_token(pairs: Pairs, constants: Constants) -> tuple[torch.Tensor, torch.Tensor]:
    return constants.beta * pairs.chosen_mean, constants.beta * pairs.rejected_mean


def _summed(pairs: Pairs, constants: Constants) -> tuple[torch.Tensor, torch.Tensor]:
    return constants.beta * pairs.chosen, constants.beta * pairs.rejected


def check_keys(losses: Mapping[str, PairLoss], facts: Mapping[str, LossFacts], constants: type[Constants]) -> None:
    """Check that keys of single losses are both in the facts and among the constants, and that a loss reads exactly the
    constants that its facts say: a key that it reads besides would be refused, and one that it does not read ignored.

    Raises RuntimeError at import. `surefoot.methods.preference` compares the constants with the config.
    """
    optional = {one.name: one for one in fields(constants) if one.default is not MISSING}
    row = "method_facts.losses.PAIR_LOSSES"
    joined(dict.fromkeys(keys_of(facts)), optional, (row, "methods.losses.preference.Constants"))
    one = torch.ones(1)
    pairs = Pairs(-2 * one, -3 * one, -one, -one, one, one)
    for name, loss in losses.items():
        told = facts[name]
        for key in (one.name for one in fields(constants)):
            given = replace(constants(beta=1.0), **{key: math.nan})
            reads = any(found.isnan() for found in (loss.loss(pairs, given), *loss.rewards(pairs, given)))
            if reads and (key in told.unread or (key in optional and key not in told.keys)):
                raise RuntimeError(f"{name!r} reads {key!r}, and its row in surefoot.{row} denies it")
            if not reads and key not in told.unread and (key in told.keys or key not in optional):
                raise RuntimeError(f"{name!r} does not read {key!r}, and its row in surefoot.{row} does not say so")


def check_references(losses: Mapping[str, PairLoss], facts: Mapping[str, LossFacts]) -> None:
    """Compute each loss for a pair without reference: a loss that wrongly claims to need none would fail in step 1, and
    one that wrongly claims to need one would load a second model for nothing.

    Raises RuntimeError at import for a loss whose facts contradict its formulas.
    """
    one = torch.ones(1)
    alone, constants = Pairs(-2 * one, -3 * one, None, None, one, one), Constants(beta=1.0)
    for name, row in losses.items():
        try:
            row.loss(alone, constants)
            row.rewards(alone, constants)
            compares = False
        except (ValueError, TypeError):  # from `_ratio`, or arithmetic with None
            compares = True
        if compares != facts[name].reference:
            found = "its loss or rewards use one" if compares else "neither its loss nor its rewards use one"
            claim = f"surefoot.method_facts.losses.PAIR_LOSSES has reference={facts[name].reference} for {name!r}"
            raise RuntimeError(f"{claim}, but {found}")


LOSSES: Mapping[str, PairLoss] = joined(
    PAIR_LOSSES,
    {
        "sigmoid": PairLoss(_sigmoid, _over_reference),
        "ipo": PairLoss(_ipo, _over_reference),
        "hinge": PairLoss(_hinge, _over_reference),
        "orpo": PairLoss(_orpo, _per_token),
        "simpo": PairLoss(_simpo, _per_token),
        "cpo": PairLoss(_cpo, _summed),
        "sigmoid_norm": PairLoss(_sigmoid_norm, _over_reference),
        "robust": PairLoss(_robust, _over_reference),
        "exo_pair": PairLoss(_exo, _over_reference),
        "nca_pair": PairLoss(_nca, _over_reference),
        "bco_pair": PairLoss(_bco, _over_reference),
        "sppo_hard": PairLoss(_sppo, _over_reference),
        "apo_zero": PairLoss(_apo_zero, _over_reference),
        "apo_down": PairLoss(_apo_down, _over_reference),
        "discopop": PairLoss(_discopop, _over_reference),
    },
    ("method_facts.losses.PAIR_LOSSES", "methods.losses.preference.LOSSES"),
)
check_keys(LOSSES, PAIR_LOSSES, Constants)
check_references(LOSSES, PAIR_LOSSES)
