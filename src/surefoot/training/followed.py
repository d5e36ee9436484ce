"""Report which module a pass is in while it runs, so that another process knows where this one died.

One hook per module and pass; no value is read or changed. Unlike `diagnose`, which looks for a value, this is for steps
that kill their process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from surefoot.training.diagnose import float_tensors

ENTERS, LEAVES, REACHES = "enters", "leaves", "reaches"


@contextmanager
def followed(model: nn.Module, report: Callable[[str, str], object]) -> Iterator[None]:
    """Context that reports which module a pass is in.

    report: called with (event, module name) when a forward pass ENTERS or LEAVES a module, and when a backward pass
        REACHES one, that is, when the gradient of its output is known.
    """

    def enters(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:  # a return value would replace the inputs
            report(ENTERS, name)

        return hook

    def leaves(name: str) -> Callable[..., None]:
        def reached(gradient: torch.Tensor) -> None:
            report(REACHES, name)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            report(LEAVES, name)
            for tensor in float_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(reached)

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enters(name)) for name, module in named]
    handles += [module.register_forward_hook(leaves(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
