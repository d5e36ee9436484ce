"""Log-probabilities of given answers under the policy and the reference.

    log p(y | x) = sum over the answer's tokens t of log softmax(logits_t)[token_t]

The head runs only on the answers' positions, so no [B, T, V] tensor exists; softmax and sums are fp32 whatever the
autocast dtype. The fp32 copy of the logits is made in chunks: without gradients it never exists as a whole, and with a
frozen chunked head (`surefoot.models.fast.chunked_head`) the logits of all positions do not exist either.

A reference is a function from rows to log-probabilities, without gradient. `adapter_off` is the base under the policy's
adapter and costs no memory; `frozen` is a separate model. Dropout is off in both: a reference is one distribution, not
a sample. Otherwise it runs like the policy, with the same autocast and kernels, so that an untrained policy equals it
exactly.

Shapes: B rows, T tokens of the longest one, N answer tokens of all rows, V vocabulary. For a packed row B is the number
of documents and T the tokens of the longest: sums are computed as in padded rows, one row per document.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import IGNORE, Batch, JudgedBatch, PairBatch, in_rows
from surefoot.kernels.chunked_loss import Head, separate, token_losses
from surefoot.kernels.drawn_tokens import DrawnTokens
from surefoot.methods.losses.mismatch import kept_alone
from surefoot.methods.losses.sft import supervised_logits, supervised_places
from surefoot.models.fast.chunked_head import chunked_head
from surefoot.models.forward import hidden_at
from surefoot.models.modes import inference_mode
from surefoot.models.peft import PeftModel
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.training.objective import LossSum, Objective

_ENTROPY_ROWS = 32  # rows per chunk if the entropy is only logged: 4 MiB with a vocabulary of 32 k, which fits a cache
_POSITIONS = 1024  # positions per fp32 chunk without gradients: half a GiB with a vocabulary of 128 k


@dataclass(frozen=True)
class AnswerLogProbs:
    """Log-probabilities of the answers of B rows.

    sums: [B] fp32, differentiable; 0 for a row without an answer.
    tokens: answer tokens of each row, [B] fp32.
    also: of the first rows, as many as asked for: log-probabilities of all their tokens but the first.
    """

    sums: torch.Tensor
    tokens: torch.Tensor
    also: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability per token, [B]; 0 for a row without an answer."""
        return self.sums / self.tokens.clamp(min=1)


def token_logprobs(model: nn.Module, rows: Batch) -> torch.Tensor:
    """Return the log-probability of every answer token at the position before it, as in `rows.targets`: [B, T] fp32,
    differentiable, 0 elsewhere; for a packed row, as its documents in padded rows."""
    head = chunked_head(model)
    found = _plain(model, rows) if head is None or head.trains else _chunked(model, rows, head)
    # Scattered by position instead of index_add by row, which has no fixed order on a GPU.
    return in_rows(found.new_zeros(rows.targets.shape).masked_scatter(rows.targets != IGNORE, found), rows)


def _plain(model: nn.Module, rows: Batch) -> torch.Tensor:
    """Log-probabilities of the answer tokens in order, [N]."""
    logits, targets = supervised_logits(model, rows)
    with torch.autocast(logits.device.type, enabled=False):
        parts = zip(logits.split(_POSITIONS), targets.split(_POSITIONS), strict=True)
        return torch.cat([-F.cross_entropy(part.float(), words, reduction="none") for part, words in parts])


def _chunked(model: nn.Module, rows: Batch, head: Head) -> torch.Tensor:
    """The same for a frozen head. With a trained head the weight of a token is only known in the backward pass."""
    places, targets = supervised_places(rows)
    return -token_losses(hidden_at(model, rows, places), head, targets)


def log_distribution(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log p of every token at every position, [N, V], in fp32 or wider."""
    # A ratio is exp of a difference of log-probabilities. In bf16 one of -5 is off by up to 0.016, and so the ratio by
    # 1.6 %.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide if temperature == 1 else wide / temperature).log_softmax(dim=-1)


def chosen_logprobs(log_p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[N, V], [N] -> log p of each target, [N]."""
    return log_p.gather(1, targets[:, None]).squeeze(1)


def token_entropy(log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of each position in nats, [N, V] -> [N]."""
    return -(log_p.exp() * log_p).sum(dim=-1)


@torch.no_grad()
def entropies(log_p: torch.Tensor) -> torch.Tensor:
    """Return `token_entropy` for logging, [N], in chunks, so that no second [N, V] exists."""
    return torch.cat([token_entropy(rows) for rows in log_p.split(_ENTROPY_ROWS)])


@dataclass(frozen=True)
class DrawnLogProbs:
    """Log-probabilities of drawn tokens, over the tokens that could be drawn.

    tokens: [N] fp32, differentiable, in the order of the targets.
    entropy: [N], of the distribution at each token; None without gradients, where it is not logged.
    """

    tokens: torch.Tensor
    entropy: torch.Tensor | None


def drawn_logprobs(model: nn.Module, rows: Batch, temperature: float, kept: torch.Tensor | None) -> DrawnLogProbs:
    """Return the log-probabilities of the answers' tokens under the distribution that they were drawn from.

    kept: [2, M], positions and tokens that could be drawn there; None: every token could.
    """
    head = chunked_head(model)
    if head is not None and not head.trains:
        places, targets = supervised_places(rows)
        loss = DrawnTokens(targets, temperature, kept)
        found = -separate(hidden_at(model, rows, places), head, loss)
        return DrawnLogProbs(found, loss.entropy if torch.is_grad_enabled() else None)
    logits, targets = supervised_logits(model, rows)
    with torch.autocast(logits.device.type, enabled=False):
        everything = kept_alone(log_distribution(logits, temperature), kept)
        entropy = entropies(everything) if torch.is_grad_enabled() else None
        return DrawnLogProbs(chosen_logprobs(everything, targets), entropy)


def answer_logprobs(model: nn.Module, rows: Batch, also: int = 0) -> AnswerLogProbs:
    """Return the log-probability of each row's answer. also: number of rows, from the first, of which that of all
    tokens is wanted as well."""
    answered = in_rows((rows.targets != IGNORE).float(), rows)
    found = token_logprobs(model, _learned_whole(rows, also) if also else rows)
    answers = found * answered if also else found
    return AnswerLogProbs(answers.sum(dim=1), answered.sum(dim=1), found[:also].sum(dim=1))


def _learned_whole(rows: Batch, count: int) -> Batch:
    """Return the rows with every token of the first ones but the first as a target."""
    follows = torch.zeros(rows.targets.shape, dtype=torch.bool)
    starts = [0, *accumulate(rows.documents)]
    for place, length in enumerate((rows.documents or rows.lengths)[:count]):
        start = starts[place] if rows.documents else 0
        follows[0 if rows.documents else place, start : start + length - 1] = True
    follows = follows.to(rows.targets.device, non_blocking=True)
    return replace(rows, targets=torch.where(follows, rows.input_ids.roll(-1, dims=1), rows.targets))


Reference = Callable[[Batch], torch.Tensor]  # B rows on the model's device -> [B] fp32


def with_reference(objective: Objective, reference: Reference) -> Objective:
    """Wrap the objective so that it computes missing reference log-probabilities."""

    def known(model: nn.Module, batch: PairBatch | JudgedBatch) -> LossSum:
        if batch.reference is None:
            batch = replace(batch, reference=reference(batch.rows))
        return objective(model, batch)

    return known


def frozen(model: nn.Module) -> Reference:
    """Use a separate model as the reference."""
    return _under(model, nullcontext)


def adapter_off(policy: PeftModel) -> Reference:
    """Use the base under the policy's adapter as the reference."""
    trunk = SharedBackbone(policy)
    return _under(policy, lambda: trunk.use_adapter(None))


def _under(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> Reference:
    def reference(rows: Batch) -> torch.Tensor:
        with inference_mode(model), context():
            return answer_logprobs(model, rows).sums

    return reference
