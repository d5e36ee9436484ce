"""Values of LoRA's A for tools that draw it otherwise: any fixed numbers of the usual size."""

import torch


def a_values(layer: int, module: str, rank: int, inputs: int) -> torch.Tensor:
    """A of a module, such as q_proj in layer 1."""
    places = torch.arange(rank * inputs, dtype=torch.float64) + 1000 * layer + 100 * len(module) + ord(module[0])
    return (torch.sin(places * 12.9898) / inputs**0.5).reshape(rank, inputs).float()
