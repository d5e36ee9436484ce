"""The state of an optimizer as named tensors, out and in again bit by bit.

torch keys optimizer state by position; positions shift when a model gains or loses a parameter. Names do not, so the
state is saved and loaded by name, as safetensors. An entry that an optimizer keeps as a Python integer travels as an
int64 scalar, which no optimizer keeps as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from surefoot.errors import Fault, IntegrityError
from surefoot.training.optimizer import Optimizer

FILE = "optimizer.safetensors"
_BLOCK = 256  # numbers that share one scale in bitsandbytes' 8-bit moments
_CODES = 256  # values that 8 bits can stand for

_Shape = Callable[[torch.Size], tuple[int, ...]]


def _scalar(_: torch.Size) -> tuple[int, ...]:
    return ()


def _like_parameter(shape: torch.Size) -> tuple[int, ...]:
    return tuple(shape)


def _scales(shape: torch.Size) -> tuple[int, ...]:
    return (math.ceil(shape.numel() / _BLOCK),)


def _codes(_: torch.Size) -> tuple[int, ...]:
    return (_CODES,)


_SHAPES: dict[str, _Shape] = {
    "step": _scalar,
    "exp_avg": _like_parameter,
    "exp_avg_sq": _like_parameter,
    "momentum_buffer": _like_parameter,  # sgd, muon
    "exp_avg_sq_row": lambda shape: tuple(shape[:-1]),  # adafactor
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
    "RMS": _scalar,
    "state1": _like_parameter,  # adamw_8bit: codes, their scales by block, and what each code means
    "state2": _like_parameter,
    "absmax1": _scales,
    "absmax2": _scales,
    "qmap1": _codes,
    "qmap2": _codes,
}


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """State as {"<parameter>/<entry>": tensor}; empty for parameters that never moved. No two share memory."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int64)
            # bitsandbytes' parameters share one table of codes, and safetensors refuses two names for one memory.
            tensors[f"{name}/{entry}"] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. Raises IntegrityError when names or shapes do not belong to this model."""
    unknown = sorted({key.rpartition("/")[0] for key in tensors} - parameters.keys())
    if unknown:
        raise IntegrityError(Fault(FILE, f"state of parameters that do not train: {unknown[:3]}"))
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if entry not in _SHAPES:
            raise IntegrityError(Fault(FILE, f"{key}: no optimizer keeps such an entry"))
        expected = _SHAPES[entry](parameter.shape)
        if value.shape != expected:
            raise IntegrityError(Fault(FILE, f"{key} is {list(value.shape)}, not {list(expected)}"))
        optimizer.state[parameter][entry] = _held(value, parameter.device)


def _held(value: torch.Tensor, device: torch.device) -> torch.Tensor | int:
    """As the optimizer keeps it: an integer, or a tensor beside its parameter."""
    if value.dtype == torch.int64:
        return int(value)
    return value.to(device)
