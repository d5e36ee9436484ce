"""A moving average of the policy's weights, beside the policy itself.

    average = decay * average + (1 - decay) * weight      after every step that moved the weights

(Polyak averaging, as DeepSpeed-Chat's `--enable_ema`.) It is held in fp32 on the CPU and written as a model of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """parameters: by name, those that are learned."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self._parameters = parameters
        self._decay = decay
        self._averages = {name: _copy(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach().float().cpu(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages for weights; afterwards its own again, bit for bit."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._averages[name].to(parameter.device, parameter.dtype, copy=True)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._averages)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._averages = {name: tensors[name].clone() for name in self._averages}


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)
