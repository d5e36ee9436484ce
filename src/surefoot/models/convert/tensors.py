"""Tensors that are not read yet (name -> shape, dtype, how to read), and operations on their names.

Rules rearrange these, so that converting a model costs the memory of one tensor, whatever its size: a part of a fused
matrix is read as the rows that it is, when it is written or put into a model. Reading changes no bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    import torch


TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # others: 1


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not read yet.

    dtype: the safetensors name, such as "BF16".
    read: returns the whole tensor, of that shape and dtype.

    `tensor[...]` reads, as a slice of a safetensors file does: transformers loads from either.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]

    @property
    def bytes(self) -> int:
        return bytes_of(self.shape, self.dtype)


Tensors = Mapping[str, LazyTensor]


def layout_error(where: str, what: str, fix: str = "") -> InputError:
    """Weights that cannot be brought into another layout exactly; arguments as in `Fault`."""
    return InputError(Fault(where, what, fix, code="SF-CONVERT-LAYOUT"))


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """dtype: the safetensors name."""
    return math.prod(shape) * _BYTES.get(dtype, 1)


def held(tensor: torch.Tensor) -> LazyTensor:
    """One that is in memory already."""
    return LazyTensor(tuple(tensor.shape), dtype_name(tensor.dtype), lambda: tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "BF16". Raises KeyError for what safetensors does not hold."""
    return {f"torch.{name}": key for key, name in TORCH_NAMES.items()}[str(dtype)]


def part(tensor: LazyTensor, dim: int, start: int, stop: int) -> LazyTensor:
    """Rows (dim 0) or columns (dim 1) start to stop, in memory of their own."""
    shape = list(tensor.shape)
    shape[dim] = stop - start
    return LazyTensor(
        tuple(shape), tensor.dtype, lambda: tensor.read().narrow(dim, start, stop - start).contiguous().clone()
    )


def joined(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """One after the other along `dim`. All have one dtype and fit (the caller has checked)."""

    def read() -> torch.Tensor:
        import torch

        return torch.cat([tensor.read() for tensor in tensors], dim=dim)

    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return LazyTensor(tuple(shape), tensors[0].dtype, read)


def turned(tensor: LazyTensor) -> LazyTensor:
    """Rows as columns."""
    return LazyTensor(tensor.shape[::-1], tensor.dtype, lambda: tensor.read().t().contiguous())


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """The same values in the same order."""
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def zeros(shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """All zero."""

    def read() -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, TORCH_NAMES[dtype]))

    return LazyTensor(shape, dtype, read)


def same_bits(first: LazyTensor, second: LazyTensor) -> bool:
    """Equal shape, dtype and bytes: -0.0 is not 0.0, and a NaN is itself."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    import torch

    return torch.equal(as_bytes(first.read()), as_bytes(second.read()))


def is_zero(tensor: LazyTensor) -> bool:
    """Every byte is 0, which 0.0 is and -0.0 is not."""
    return not bool(as_bytes(tensor.read()).any())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, one-dimensional."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


SHOWN = 3  # names per message: enough to see the pattern


def some(names: Iterable[str]) -> str:
    """The first names, and that there are more."""
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, LazyTensor]:
    """Every name through `rename`. Raises InputError where two become one."""
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in result:
            raise layout_error(name, f"two weights would be called {new}")
        result[new] = tensor
    return result


def require_free(name: str, tensors: Tensors) -> None:
    if name in tensors:
        raise layout_error(name, "is there already: the file holds a weight both fused and split")


def in_layers(layers: str, paths: Iterable[str]) -> re.Pattern[str]:
    """Weights and biases of these modules in every decoder layer."""
    either = "|".join(map(re.escape, paths))
    return re.compile(rf"(?P<front>{re.escape(layers)}\.\d+)\.(?P<path>{either})\.(?P<kind>weight|bias)")
