"""A model whose decoder goes through torch.compile, for a while as it is written."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def as_written(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, nothing of the model is compiled: for passes that are taken once and need not wait for a compiler."""
    if not is_compiled(model):
        return nullcontext()  # the stance imports the compiler, which takes a second
    return torch.compiler.set_stance("force_eager")


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model goes through torch.compile."""
    return any(module._compiled_call_impl is not None for module in model.modules())
