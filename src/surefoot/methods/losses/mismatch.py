"""Mismatch between the engine that samples answers and the training code, and importance weights that correct it.

With p the probability of a sampled token in the training code, under the weights that sampled it, and q in the engine:

    r_t   = p_t / q_t                                        of a token; sequence: the product over its answer
    k3    = mean of r_t - 1 - log r_t                        estimates KL(q, p), Schulman 2020
    size  = (sum r_t)^2 / (n sum r_t^2)                      effective sample size as a fraction, Kish 1965
    truncate    w = clip(r, low, high)                       Ionides 2008; for engines: Yao et al. 2025 (TIS)
    mask        w = r if low <= r <= high, else 0            Ling Team 2025, arXiv 2510.18855 (IcePop)

The weight multiplies a token's policy loss, not its penalty. The four corrections are TRL's
`vllm_importance_sampling_mode`, low and high its `vllm_importance_sampling_clip_min` and `..._max`.

If the engine samples from a subset of tokens (top_p, top_k), p and q are both probabilities within the subset;
otherwise p / q would be too small by the subset's probability at every token (trl#6789). `kept_alone` renormalizes p.

Shapes: E answers, R tokens of the longest, N tokens, V vocabulary, M kept tokens of all N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.kernels.drawn_tokens import NEVER
from surefoot.method_facts.losses import CorrectionKind


@dataclass(frozen=True)
class Correction:
    """Importance weights. low, high: bounds of the ratio; None: unbounded."""

    kind: CorrectionKind
    low: float | None
    high: float | None

    def weights(self, apart: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the weight of every token, [E, R], and the fraction of ratios out of bounds.

        apart: log r, [E, R].
        real: [E, R] bool, True at answer tokens.
        """
        # float64: fp32 overflows at exp(89), which the sum over a long answer reaches.
        moved = apart.double().where(real, 0.0)
        if self.kind.startswith("sequence"):
            moved = moved.sum(dim=1, keepdim=True).expand_as(moved)
        ratio = moved.exp()
        near = ratio.clamp(self.low, self.high) if (self.low, self.high) != (None, None) else ratio
        weights = near if self.kind.endswith("truncate") else ratio.where(near == ratio, 0.0)
        return weights.where(real, 0.0).float(), float((near != ratio)[real].double().mean())


def mismatch(logprobs: torch.Tensor, drawn: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    """Return mean and largest |log r|, k3 and effective sample size over the tokens with known engine probabilities.

    logprobs, drawn: [E, R], of the training code and of the engine; the latter NaN if unknown.
    real: [E, R] bool, True at answer tokens.
    """
    known = real & ~drawn.isnan()
    if not known.any():
        return {}
    apart = (logprobs - drawn)[known].double()
    ratio = apart.exp()
    return {
        "mismatch": float(apart.abs().mean()),
        "mismatch_most": float(apart.abs().max()),
        "mismatch_k3": float((ratio - 1 - apart).mean()),
        "sample_size": float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    }


def kept_alone(log_p: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Renormalize log-probabilities [N, V] over the tokens that could be sampled.

    kept: [2, M], position and token that could be sampled there; None: everything.
    """
    if kept is None:
        return log_p
    left_out = torch.ones_like(log_p, dtype=torch.bool)
    left_out[kept[0], kept[1]] = False
    return log_p.masked_fill(left_out, NEVER).log_softmax(dim=-1)
