"""Dequantize stored weights: MXFP4 and block-wise FP8 here, GPTQ, AWQ and compressed-tensors in `decoded_integers`.

`decoded(tensors, config)` returns plain weights under the names of an unquantized model; a tensor is dequantized when
it is read. The model is then trained or adapted like any other, in 16 or 32 bits.

MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): a byte of `X_blocks` [experts, rows, groups, 16] holds two 4-bit values,
the low half first; `X_scales` [experts, rows, groups] holds one exponent per 32 values. In transformers X is
[experts, columns, rows]. The values are exact in bf16.

    x = e2m1 * 2^(scale - 127)

FP8 (DeepSeek-V3, Qwen3-FP8): `X.weight` in e4m3, and `X.weight_scale_inv` with one scale per block of 128 x 128. The
product is computed in fp32; loading rounds it to the base's dtype.

    x = e4m3 * scale_inv
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.models.convert.decoded_integers import decoded_integers
from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the fourth bit is the sign
_BIAS = 127  # of the e8m0 exponents


def decoded(tensors: Tensors, stored: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return name -> plain tensor: MXFP4 in bf16, other quantized ones in fp32, unquantized ones unchanged.

    tensors: the stored tensors.
    stored: config.json's quantization_config, of a kind that `surefoot.families.stored_forms.stored_form` knows.

    Raises InputError if scales are missing or shapes do not match.
    """
    if stored["quant_method"] not in ("mxfp4", "fp8"):
        return decoded_integers(tensors, stored)
    plain: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(BLOCKS) and tensor.dtype == "U8":
            stem = name.removesuffix(BLOCKS)
            plain[stem] = _mxfp4(name, tensor, _factors_of(tensors, name, stem + SCALES))
        elif tensor.dtype == "F8_E4M3":
            plain[name] = _fp8(name, tensor, _factors_of(tensors, name, name + FACTORS), stored["weight_block_size"])
        elif not _is_factor(name, tensors):
            plain[name] = tensor
    return plain


def _is_factor(name: str, tensors: Tensors) -> bool:
    numbers = name.removesuffix(SCALES) + BLOCKS if name.endswith(SCALES) else name.removesuffix(FACTORS)
    return numbers != name and numbers in tensors


def _factors_of(tensors: Tensors, name: str, factors: str) -> LazyTensor:
    if factors not in tensors:
        raise layout_error(name, f"its scales {factors} are missing", "copy or download the model again")
    return tensors[factors]


def _mxfp4(name: str, blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
        raise layout_error(name, f"has shape {list(blocks.shape)}, but its scales have {list(scales.shape)}")
    experts, rows, groups, half = blocks.shape

    def read() -> torch.Tensor:
        import torch

        packed, exponents = blocks.read(), scales.read().to(torch.int32) - _BIAS
        values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16)
        plain = torch.empty(experts, groups * half * 2, rows, dtype=torch.bfloat16)
        for expert in range(experts):  # one at a time: the indices need 16 times the memory of the packed values
            pair = torch.stack((packed[expert] & 15, packed[expert] >> 4), dim=-1).flatten(-2)
            numbers = torch.ldexp(values[pair.long()], exponents[expert].unsqueeze(-1))
            plain[expert] = numbers.reshape(rows, -1).t()
        return plain

    return LazyTensor((experts, groups * half * 2, rows), "BF16", read)


def _fp8(name: str, numbers: LazyTensor, factors: LazyTensor, block: tuple[int, int]) -> LazyTensor:
    grid = tuple(-(-size // of) for size, of in zip(numbers.shape, block, strict=False))
    if len(numbers.shape) != 2 or factors.shape != grid:
        what = f"has shape {list(numbers.shape)} in blocks of {list(block)}, but its scales have {list(factors.shape)}"
        raise layout_error(name, what)

    def read() -> torch.Tensor:
        import torch

        rows, columns = numbers.shape
        whole = factors.read().to(torch.float32)
        whole = whole.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return numbers.read().to(torch.float32) * whole

    return LazyTensor(numbers.shape, "F32", read)
