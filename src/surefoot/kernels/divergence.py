"""Divergences of a student's next-token distribution p from a teacher's q, as losses of single positions.

    beta = 0        KL(q, p)     = sum q (log q - log p)                                        forward KL
    beta = 1        KL(p, q)     = sum p (log p - log q)                                        reverse KL
    between         beta KL(q, m) + (1 - beta) KL(p, m),    m = beta q + (1 - beta) p           generalized JSD

(Agarwal et al. 2024, arXiv 2306.13649, equation 1; at its ends that JSD is 0 times a KL, and the ends here are the KLs
themselves, as in the paper's experiments.) The gradient by the logits z of p, with a = log p - log m:

    p - q           p (log p - log q - KL(p, q))            (1 - beta) p (a - KL(p, m))

a is log1p(c expm1(-|d|)) of d = log q - log p, which neither overflows nor rounds d = 0 to anything but 0: equal
distributions have a loss and a gradient of exactly 0. At a temperature T, p and q are softmax(z / T), and the gradient
by z has a factor 1 / T; the loss is not multiplied by T^2.

Of a teacher that is stored or served only the K likeliest tokens are known, and the mass of all others together, "the
rest". Then p and q are compared over K + 1 outcomes. Joining outcomes never raises a divergence, so that is a lower
bound of the whole one, and 0 where the two are equal. Within the rest nothing is pulled apart: its gradient is the
outcome's, shared out as p is.

Shapes: N positions, n of one part, V vocabulary, W token ids that both models have, M outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from surefoot.kernels.chunked_loss import CrossEntropy, Head, TokenWeight, head_output


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each row, [n], and its gradient by the logits of p, [n, M].

    log_p, log_q: [n, M], of outcomes whose probabilities add up to 1.
    beta: 0 to 1, see the head of this module.
    """
    if beta == 0:
        q = log_q.exp()
        return (q * (log_q - log_p)).sum(dim=1), log_p.exp() - q
    p = log_p.exp()
    if beta == 1:
        terms = p * (log_p - log_q)
        values = terms.sum(dim=1)
        return values, terms.addcmul_(p, values.unsqueeze(1), value=-1)
    d = log_q - log_p
    # log m is the larger of log p and log q, plus log1p(c expm1(-|d|)) with c the share of the smaller one.
    share = beta + (1 - 2 * beta) * (d > 0).to(d.dtype)
    from_p = torch.expm1(-d.abs()).mul_(share).log1p_().add_(d.clamp(min=0)).neg_()  # log p - log m
    own = p * from_p
    of_student = own.sum(dim=1)
    of_teacher = ((d + from_p) * log_q.exp()).sum(dim=1)
    gradient = own.addcmul_(p, of_student.unsqueeze(1), value=-1).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, gradient


class Known(Protocol):
    """What is known of the teacher's distributions at N positions.

    words: number of token ids, from 0, that it distributes probability over; None: as many as the student has.
    """

    @property
    def words(self) -> int | None: ...

    def compare(
        self, log_p: torch.Tensor, part: slice, beta: float, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the divergence [n] at the positions `part`, its gradient [n, W] by the student's logits over the
        temperature, and the teacher's likeliest tokens [n].

        log_p: [n, W], of the student at the temperature; may be overwritten.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """A teacher in memory: the input of its head, whose logits are computed where they are compared, or its logits.

    hidden: [N, H] of its own H, in the dtype of the head's product; None: the logits are known.
    head: the teacher's output head.
    logits: [N, V] of its own V.
    words: see `Known`.
    """

    hidden: torch.Tensor | None
    head: Head | None
    logits: torch.Tensor | None
    words: int

    @property
    def positions(self) -> int:
        """N."""
        known = self.logits if self.hidden is None else self.hidden
        return 0 if known is None else len(known)

    def compare(
        self, log_p: torch.Tensor, part: slice, beta: float, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Known`."""
        log_q = self.log_probabilities(part, log_p.dtype, temperature)
        values, gradient = divergence(log_p, log_q, beta)
        return values, gradient, log_q.argmax(dim=1)

    def log_probabilities(self, part: slice, dtype: torch.dtype, temperature: float) -> torch.Tensor:
        """Return log q at the temperature, [n, W]."""
        logits = self._logits(part, dtype)
        return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=1)

    def _logits(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        if self.hidden is None or self.head is None:
            assert self.logits is not None
            return self.logits[part, : self.words].to(dtype)
        x, bias = self.hidden[part], self.head.bias
        with torch.autocast(x.device.type, enabled=False):
            own = None if bias is None else bias[: self.words].to(x.dtype)
            return self.head.change(head_output(x, self.head.weight[: self.words].to(x.dtype), own).to(dtype))


@dataclass(frozen=True)
class Likeliest:
    """A teacher of which the K likeliest tokens of each position are known.

    tokens: [N, K] int64, distinct in a row, the likeliest first.
    logprobs: [N, K] fp32, at the temperature of the loss.
    rest: [N] fp32, logarithm of the probability of all other tokens.
    words: see `Known`.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    rest: torch.Tensor
    words: int | None = None

    def compare(
        self, log_p: torch.Tensor, part: slice, beta: float, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Known`."""
        tokens = self.tokens[part]
        chosen = log_p.gather(1, tokens)
        others = log_p.scatter_(1, tokens, -torch.inf)
        # Summed over the others: 1 - the sum of the known ones would cancel where these have nearly all probability.
        rest = others.logsumexp(dim=1, keepdim=True)
        log_q = torch.cat([self.logprobs[part], self.rest[part].unsqueeze(1)], dim=1).to(log_p.dtype)
        values, by_outcome = divergence(torch.cat([chosen, rest], dim=1), log_q, beta)
        gradient = others.sub_(rest).exp_().mul_(by_outcome[:, -1:])  # each by its share of the rest
        return values, gradient.scatter_(1, tokens, by_outcome[:, :-1]), tokens[:, 0]


class Distillation:
    """The `TokenLoss` of a student beside its teacher: divergence + sft * cross entropy.

    After use it holds, of each position: `divergence`, and where `measures` is true `cross_entropy` of the target,
    `correct` and `agrees`, whether the student's likeliest token is the target or the teacher's.
    """

    bound = None

    def __init__(
        self,
        known: Known,
        targets: torch.Tensor,
        *,
        beta: float,
        temperature: float,
        sft: float,
        measures: bool = False,
    ):
        """targets: [N]. sft: weight of their cross entropy at temperature 1."""
        self._known, self._targets, self._measures = known, targets, measures
        self._beta, self._temperature, self._sft = beta, temperature, sft
        self.divergence = torch.zeros(len(targets), device=targets.device)
        self.cross_entropy = torch.zeros_like(self.divergence)
        self.correct = torch.zeros_like(self.divergence)
        self.agrees = torch.zeros_like(self.divergence)

    def __call__(
        self, logits: torch.Tensor, part: slice, wanted: bool, narrow: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        words, own, chosen = self._targets[part].unsqueeze(1), None, None
        if self._sft or self._measures:
            log_p = torch.log_softmax(logits, dim=1)
            chosen = log_p.gather(1, words)
            self.cross_entropy[part] = -chosen.squeeze(1)
            if wanted and self._sft:
                own = log_p.exp_().scatter_(1, words, chosen.exp() - 1).mul_(self._sft)
        first = logits.argmax(dim=1) if self._measures else None
        common = logits[:, : self._known.words]
        common = common if self._temperature == 1 else common / self._temperature
        log_p = torch.log_softmax(common, dim=1)
        values, gradient, choices = self._known.compare(log_p, part, self._beta, self._temperature)
        self.divergence[part] = values
        if first is not None:
            self.correct[part], self.agrees[part] = (first == words.squeeze(1)).float(), (first == choices).float()
        losses = values if chosen is None else values - self._sft * chosen.squeeze(1)
        if not wanted:
            return losses, None
        gradient = gradient if self._temperature == 1 else gradient.div_(self._temperature)
        more = logits.shape[1] - gradient.shape[1]
        gradient = F.pad(gradient, (0, more)) if more else gradient  # what the teacher does not have
        return losses, gradient if own is None else gradient.add_(own)


class Anchored:
    """The `TokenLoss` of weighted cross entropy beside a reference: weight * cross entropy + kl * KL(q, p).

    After use it holds the `divergence` KL(q, p) of each position.
    """

    bound = None

    def __init__(self, known: Known, targets: torch.Tensor, *, weight: TokenWeight, kl: float):
        """targets: [N]. weight: of their cross entropy. kl: of the divergence."""
        self._known, self._kl = known, kl
        self._tokens = CrossEntropy(targets, weight)
        self.divergence = torch.zeros(len(targets), device=targets.device)

    def __call__(
        self, logits: torch.Tensor, part: slice, wanted: bool, narrow: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_p = torch.log_softmax(logits, dim=1)
        values, pull, _ = self._known.compare(log_p, part, 0.0, 1.0)
        self.divergence[part] = values
        losses, gradient = self._tokens(logits, part, wanted)
        losses = losses + self._kl * values
        return losses, None if gradient is None else gradient.add_(pull, alpha=self._kl)
