"""How far the engine that drew the answers is from the code that learns from them, and weights that correct for it.

With p the probability of a drawn token in the code that learns, under the weights that drew it, and q in the engine:

    r_t   = p_t / q_t                                        of a token; sequence: the product over its answer
    k3    = mean of r_t - 1 - log r_t                        estimates KL(q, p), Schulman 2020
    size  = (sum r_t)^2 / (n sum r_t^2)                      effective sample size as a share, Kish 1965
    truncate    w = clip(r, low, high)                       Ionides 2008; of engines: Yao et al. 2025 (TIS)
    mask        w = r where low <= r <= high, else 0         Ling Team 2025, arXiv 2510.18855 (IcePop)

The weight multiplies what is learned of a token, and not its penalty. The four corrections are TRL's
`vllm_importance_sampling_mode`, low and high its `vllm_importance_sampling_clip_min` and `..._max`.

Where the engine draws from some tokens alone (top_p, top_k), p and q are both probabilities among these: p / q would
else be too small by their share of all probability in every token (trl#6789). `kept_alone` does that for p.

Shapes: E answers, R tokens of the longest, N tokens, V vocabulary, M kept tokens of all N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.method_facts.losses import CorrectionKind

_NEVER = -1e30  # log-probability of what cannot be drawn: its exponential is 0, and 0 times it is 0


@dataclass(frozen=True)
class Correction:
    """low, high: how far below and above 1 a ratio may be; None: as far as it likes."""

    kind: CorrectionKind
    low: float | None
    high: float | None

    def weights(self, apart: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Of every token, [E, R], and the share of them whose ratio was out of bounds.

        apart: log r, [E, R].
        real: [E, R] bool, which places are answers' tokens.
        """
        moved = apart.double().where(real, 0.0)
        if self.kind.startswith("sequence"):
            moved = moved.sum(dim=1, keepdim=True).expand_as(moved)
        ratio = moved.exp()
        near = ratio.clamp(self.low, self.high) if (self.low, self.high) != (None, None) else ratio
        weights = near if self.kind.endswith("truncate") else ratio.where(near == ratio, 0.0)
        return weights.where(real, 0.0).float(), float((near != ratio)[real].double().mean())


def mismatch(logprobs: torch.Tensor, drawn: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    """Mean and largest |log r|, k3 and effective sample size, over the tokens of which the engine tells.

    logprobs, drawn: [E, R], of the code that learns and of the engine; the latter NaN where it cannot tell.
    real: [E, R] bool, which places are answers' tokens.
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
    """[N, V] log-probabilities among all tokens -> the same among those that could be drawn.

    kept: [2, M], token and what could be drawn in its place; None: everything.
    """
    if kept is None:
        return log_p
    left_out = torch.ones_like(log_p, dtype=torch.bool)
    left_out[kept[0], kept[1]] = False
    return log_p.masked_fill(left_out, _NEVER).log_softmax(dim=-1)
