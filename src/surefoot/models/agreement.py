"""How far two models are apart on the same texts: logits, and the token that each would write next.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Agreement:
    """largest: difference of two logits. share: of the largest logit of the first model. top1: share of the positions
    whose likeliest token is the same. Not finite where a logit is not."""

    largest: float
    share: float
    top1: float
    positions: int


@torch.no_grad()
def logits_of(model: nn.Module, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[T, V] per text, in fp32 on the CPU. One text at a time: padding would be one more thing that could differ."""
    device = next(model.parameters()).device
    found = []
    for ids in texts:
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        found.append(logits[0].float().cpu())
    return found


def rounding_noise(model: nn.Module, texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]) -> float:
    """How far one rounding moves the logits of this model: every embedding of `texts` by one unit in the last place,
    up or down at random (the same in every call). A share of the largest logit.

    model: in the dtype of which the rounding is. logits: what it gives without.
    """

    def one_unit(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        up = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(output)
        return torch.nextafter(output, towards)

    handle = model.get_input_embeddings().register_forward_hook(one_unit)  # type: ignore[operator]
    try:
        return compare_logits(logits, logits_of(model, texts)).share
    finally:
        handle.remove()


def compare_logits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Agreement:
    """Raises ValueError where the shapes differ."""
    largest, scale, same, positions = [0.0], [0.0], 0, 0
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"logits {list(a.shape)} and {list(b.shape)}")
        largest.append(float((a - b).abs().max()))
        scale.append(float(a.abs().max()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        positions += a.shape[0]
    difference = float(torch.tensor(largest).max())  # NaN wins, as it does not with Python's max
    return Agreement(difference, difference / max(float(torch.tensor(scale).max()), 1e-30), same / positions, positions)
