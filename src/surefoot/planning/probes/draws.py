"""Random inputs of the probes, the same in every call on the same kind of device."""

from __future__ import annotations

from collections.abc import Callable

import torch

Draw = Callable[..., torch.Tensor]  # sizes -> fp32 numbers, standard normal


def draws(device: torch.device, seed: int = 0) -> Draw:
    """A stream of its own; torch's is left alone. On a GPU they are drawn there: a processor thread would take seconds
    for the hundreds of millions that the probes of a GPU take."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *sizes: torch.randn(sizes, generator=generator, device=device)
