"""The state of an optimizer as named tensors, out and in again bit by bit.

torch keys optimizer state by position; positions shift when a model gains or loses a parameter. Names do not, so the
state is saved and loaded by name, as safetensors. An entry that an optimizer keeps as a Python integer travels as an
int64 scalar, which no optimizer keeps as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from surefoot.system.errors import Fault, IntegrityError
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


def state_entries(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """State as ("<parameter>/<entry>", tensor); none for parameters that never moved."""
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield (
                f"{name}/{entry}",
                value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int64),
            )


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The same as a dict, of which no two share memory."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in state_entries(optimizer, parameters):
        # bitsandbytes' parameters share one table of codes, and safetensors refuses two names for one memory.
        tensors[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return tensors


def _beside(entry: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    return entry.to(parameter.device)


def load_optimizer_tensors(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    *,
    held: Callable[[torch.Tensor, nn.Parameter], torch.Tensor] = _beside,
) -> None:
    """The inverse of `optimizer_tensors`. held: what the optimizer is to hold of an entry of a parameter.

    Raises IntegrityError when names or shapes do not belong to this model.
    """
    check_state(parameters, tensors)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        # An int64 scalar is what an optimizer keeps as a Python integer.
        own = int(value) if value.dtype == torch.int64 else held(value, parameters[name])
        optimizer.state[parameters[name]][entry] = own


def check_state(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises IntegrityError where names or shapes of a state are not those of these parameters."""
    unknown = sorted({key.rpartition("/")[0] for key in tensors} - parameters.keys())
    if unknown:
        raise IntegrityError(
            Fault(FILE, f"state of parameters that do not train: {unknown[:3]}", code="SF-CHECKPOINT-DAMAGED")
        )
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if entry not in _SHAPES:
            raise IntegrityError(Fault(FILE, f"{key}: no optimizer keeps such an entry", code="SF-CHECKPOINT-DAMAGED"))
        expected = _SHAPES[entry](parameter.shape)
        if value.shape != expected:
            raise IntegrityError(
                Fault(FILE, f"{key} is {list(value.shape)}, not {list(expected)}", code="SF-CHECKPOINT-DAMAGED")
            )
