"""Lazily read tensors (shape, dtype and a read function), and operations on them and on their names.

Conversion rules work on these, so that converting a model of any size needs the memory of one tensor: for example, a
part of a fused matrix is read only when it is written or loaded into a model. Reading is bit-exact.
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
    """A lazily read tensor. `tensor[...]` reads it, like a slice of a safetensors file, so that transformers can load
    it.

    dtype: the safetensors name, such as "BF16".
    read: returns the tensor, of that shape and dtype.
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
    """Make the error for weights that cannot be converted exactly; arguments as in `Fault`."""
    return InputError(Fault(where, what, fix, code="SF-CONVERT-LAYOUT"))


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Return the size of a tensor in bytes. dtype: the safetensors name."""
    return math.prod(shape) * _BYTES.get(dtype, 1)


def held(tensor: torch.Tensor) -> LazyTensor:
    """Wrap a tensor that is in memory already."""
    return LazyTensor(tuple(tensor.shape), dtype_name(tensor.dtype), lambda: tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, such as "BF16". Raises KeyError for unsupported dtypes."""
    return {f"torch.{name}": key for key, name in TORCH_NAMES.items()}[str(dtype)]


def part(tensor: LazyTensor, dim: int, start: int, stop: int) -> LazyTensor:
    """Return rows (dim 0) or columns (dim 1) start to stop, as a copy."""
    shape = list(tensor.shape)
    shape[dim] = stop - start
    return LazyTensor(
        tuple(shape), tensor.dtype, lambda: tensor.read().narrow(dim, start, stop - start).contiguous().clone()
    )


def joined(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Concatenate along `dim`. The caller must check that dtypes and shapes match."""

    def read() -> torch.Tensor:
        import torch

        return torch.cat([tensor.read() for tensor in tensors], dim=dim)

    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return LazyTensor(tuple(shape), tensors[0].dtype, read)


def turned(tensor: LazyTensor) -> LazyTensor:
    """Transpose a matrix."""
    return LazyTensor(tensor.shape[::-1], tensor.dtype, lambda: tensor.read().t().contiguous())


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Reshape a tensor."""
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def zeros(shape: tuple[int, ...], dtype: str) -> LazyTensor:
    """Make a tensor of zeros."""

    def read() -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, TORCH_NAMES[dtype]))

    return LazyTensor(shape, dtype, read)


def same_bits(first: LazyTensor, second: LazyTensor) -> bool:
    """Whether shape, dtype and bytes are equal: -0.0 differs from 0.0, and a NaN equals itself."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    import torch

    return torch.equal(as_bytes(first.read()), as_bytes(second.read()))


def is_zero(tensor: LazyTensor) -> bool:
    """Whether every byte is 0, which is true for 0.0 but not for -0.0."""
    return not bool(as_bytes(tensor.read()).any())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, [N] uint8."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


SHOWN = 3  # names per message: enough to see the pattern


def some(names: Iterable[str]) -> str:
    """Format the first names, with an ellipsis if there are more."""
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, LazyTensor]:
    """Rename all tensors. Raises InputError if two names become the same."""
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in result:
            raise layout_error(name, f"two weights would be called {new}")
        result[new] = tensor
    return result


def require_free(name: str, tensors: Tensors) -> None:
    if name in tensors:
        raise layout_error(name, "exists already: the file contains a weight both fused and split")


def in_layers(layers: str, paths: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for weights and biases of these modules in every decoder layer."""
    either = "|".join(map(re.escape, paths))
    return re.compile(rf"(?P<front>{re.escape(layers)}\.\d+)\.(?P<path>{either})\.(?P<kind>weight|bias)")
