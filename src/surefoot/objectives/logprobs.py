"""How likely a model finds given answers: log-probabilities of the tokens that a batch marks as answers.

    log p(y | x) = sum over the answer's tokens t of log softmax(logits_t)[token_t]

The head runs on the answers' positions alone, so no [B, T, V] tensor exists; softmax and sums are fp32 whatever the
autocast dtype. The fp32 copy of the logits is made a few positions at a time: where no gradient is wanted it never
exists as a whole.

Shapes: B rows, T tokens of the longest one, N answer tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batch import IGNORE, Batch
from surefoot.objectives.sft import supervised_logits

_POSITIONS = 1024  # of which an fp32 copy exists at once without gradients: half a GiB at 128 k words


@dataclass(frozen=True)
class AnswerLogProbs:
    """sums: [B] fp32, differentiable; 0 for a row without an answer. tokens: answer tokens of each row, [B] fp32."""

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Per token, [B]; 0 for a row without an answer."""
        return self.sums / self.tokens.clamp(min=1)


def token_logprobs(model: nn.Module, rows: Batch) -> torch.Tensor:
    """Log-probability of every answer token, where its predecessor stands as in `rows.targets`: [B, T] fp32,
    differentiable, 0 elsewhere."""
    logits, targets = supervised_logits(model, rows)
    with torch.autocast(logits.device.type, enabled=False):
        parts = zip(logits.split(_POSITIONS), targets.split(_POSITIONS), strict=True)
        found = torch.cat([-F.cross_entropy(part.float(), words, reduction="none") for part, words in parts])
    # Put back by place rather than added up by row: adding by index has no fixed order on a GPU.
    return found.new_zeros(rows.targets.shape).masked_scatter(rows.targets != IGNORE, found)


def answer_logprobs(model: nn.Module, rows: Batch) -> AnswerLogProbs:
    """Of each row's answer as a whole."""
    return AnswerLogProbs(token_logprobs(model, rows).sum(dim=1), (rows.targets != IGNORE).sum(dim=1).float())
