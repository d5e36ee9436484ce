"""Dequantize weights with scales per group of input columns: GPTQ, AWQ and compressed-tensors.

A linear layer [outputs, inputs] is stored as integers q, with a scale s and a zero point z per output and group of
inputs:

    w = s (q - z)

computed in fp32, where it is exact. Integers are packed into 32-bit words, lowest bits first.

GPTQ                `X.qweight` [inputs * bits / 32, outputs]; `X.qzeros` [groups, outputs * bits / 32], each stored
                    minus one, with the borrow inside the word (gptq_v2: unchanged); `X.scales` [groups, outputs];
                    `X.g_idx` [inputs], the group of each input
AWQ (gemm)          `X.qweight` [inputs, outputs / 8]; `X.qzeros` [groups, outputs / 8]; `X.scales` [groups, outputs];
                    the 4-bit values of a word are columns 0, 2, 4, 6, 1, 3, 5, 7
compressed-tensors  pack-quantized: `X.weight_packed` [outputs, inputs * bits / 32], stored as q + 2^(bits - 1);
                    `X.weight_shape`; `X.weight_scale` [outputs, groups]; `X.weight_zero_point`
                    [outputs * bits / 32, groups]; `X.weight_g_idx` [inputs].
                    int-, float- and naive-quantized: `X.weight` in int8 or e4m3, with scales per row, tensor or block
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error

if TYPE_CHECKING:
    import torch

_WORD = 32
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's 4-bit values, from the lowest bits
_GPTQ_BITS = (2, 4, 8)
_ROWS = 256  # computed at a time: temporaries of all rows would need twice the memory of the result

Parts = Mapping[str, LazyTensor]  # a module's tensors by the last part of their names, such as "qweight"


def decoded_integers(tensors: Tensors, stored: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return name -> plain tensor: quantized ones in fp32, others unchanged. Arguments and errors as of `decoded`."""
    modules: defaultdict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        stem, dot, kind = name.rpartition(".")
        modules[stem + dot][kind] = tensor
    decode, kinds = _FORMS[stored["quant_method"]]
    plain: dict[str, LazyTensor] = {}
    for stem, parts in modules.items():
        quantized = not kinds.isdisjoint(parts)
        plain |= {stem + kind: tensor for kind, tensor in parts.items() if not (quantized and kind in _OWN)}
        if quantized:
            plain[f"{stem}weight"] = decode(stem, parts, stored)
    return plain


def _gptq(stem: str, parts: Parts, stored: Mapping[str, Any]) -> LazyTensor:
    words, zeros, factors = (_part(stem, parts, kind) for kind in ("qweight", "qzeros", "scales"))
    held, outputs = words.shape
    inputs = parts["g_idx"].shape[0] if "g_idx" in parts else held * _WORD // stored["bits"]
    bits = held * _WORD // inputs  # of this layer: some checkpoints use more bits in some layers
    fits = bits in _GPTQ_BITS and held * _WORD == inputs * bits
    if not fits or factors.shape[1] != outputs or zeros.shape != (factors.shape[0], _words(outputs, bits)):
        raise _unlike(f"{stem}qweight", words, zeros, factors)
    taken = 0 if stored.get("checkpoint_format") == "gptq_v2" else sum(1 << at for at in range(0, _WORD, bits))
    size = stored.get("group_size", -1)

    def read() -> torch.Tensor:
        columns = _columns(stem, parts.get("g_idx"), inputs, size, factors.shape[0])
        zero = _unpacked(zeros.read() + taken, bits, outputs)
        return _product(_unpacked(words.read().t(), bits, inputs), zero.t(), factors.read().t(), columns)

    return LazyTensor((outputs, inputs), "F32", read)


def _awq(stem: str, parts: Parts, stored: Mapping[str, Any]) -> LazyTensor:
    words, zeros, factors = (_part(stem, parts, kind) for kind in ("qweight", "qzeros", "scales"))
    inputs, outputs = words.shape[0], words.shape[1] * 8
    if factors.shape[1] != outputs or zeros.shape != (factors.shape[0], words.shape[1]):
        raise _unlike(f"{stem}qweight", words, zeros, factors)
    size = stored.get("group_size", stored.get("q_group_size", -1))

    def read() -> torch.Tensor:
        columns = _columns(stem, None, inputs, size, factors.shape[0])
        numbers, zero = (_unpacked(one.read(), 4, outputs) for one in (words, zeros))
        order = [word + _AWQ_COLUMNS.index(column) for word in range(0, outputs, 8) for column in range(8)]
        return _product(numbers[:, order].t(), zero[:, order].t(), factors.read().t(), columns)

    return LazyTensor((outputs, inputs), "F32", read)


def _compressed(stem: str, parts: Parts, stored: Mapping[str, Any]) -> LazyTensor:
    factors, zeros = _part(stem, parts, "weight_scale"), parts.get("weight_zero_point")
    schemes = [group["weights"] for group in stored["config_groups"].values()]
    packed = parts.get("weight_packed")
    if packed is not None:
        outputs, inputs = _part(stem, parts, "weight_shape").read().tolist()
        bits = next((one["num_bits"] for one in schemes if _words(inputs, one["num_bits"]) == packed.shape[1]), 0)
        name, numbers = f"{stem}weight_packed", packed
        held = (_words(outputs, bits), factors.shape[-1]) if bits else ()
        fits = bits > 0 and packed.shape[0] == outputs and factors.shape[0] == outputs
    else:
        numbers, bits = _part(stem, parts, "weight"), 0
        name, held, (outputs, inputs) = f"{stem}weight", factors.shape, numbers.shape
        fits = numbers.dtype in ("I8", "F8_E4M3")
    if not fits or (zeros is not None and zeros.shape != held):
        raise _unlike(name, numbers, factors, *([zeros] if zeros else []))
    block = next((one["block_structure"] for one in schemes if one.get("strategy") == "block"), (1, 1))

    def read() -> torch.Tensor:
        import torch

        factor = factors.read().reshape(-1, factors.shape[-1] if factors.shape else 1)
        if packed is None:
            whole = numbers.read()
            zero = torch.zeros_like(factor) if zeros is None else zeros.read().reshape(factor.shape)
        else:
            whole = _unpacked(packed.read(), bits, inputs)
            middle = torch.full_like(factor, 2 ** (bits - 1))
            zero = middle if zeros is None else _unpacked(zeros.read().t(), bits, outputs).t()
        if factor.shape[0] in (1, outputs):
            size = -(-inputs // factor.shape[1])
        else:  # blocks span rows, too
            size = block[1]
            factor, zero = (one.repeat_interleave(block[0], 0)[:outputs] for one in (factor, zero))
        columns = _columns(stem, parts.get("weight_g_idx"), inputs, size, factor.shape[1])
        return _product(whole, zero.expand(outputs, -1), factor.expand(outputs, -1), columns)

    return LazyTensor((outputs, inputs), "F32", read)


def _columns(stem: str, groups: LazyTensor | None, inputs: int, size: int, count: int) -> torch.Tensor:
    """Return the group of each input, [inputs].

    groups: g_idx, if stored.
    size: inputs per group; -1 for a single group.
    count: number of groups with scales.
    """
    import torch

    if groups is None:
        found = torch.arange(inputs) // (size if size > 0 else inputs)
    else:
        found = groups.read().long()
    if len(found) != inputs or int(found.min()) < 0 or int(found.max()) >= count:
        raise layout_error(stem.rstrip("."), f"has scales for {count} groups of inputs, but inputs of other groups")
    return found


def _product(numbers: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return s (q - z) in fp32, [outputs, inputs].

    numbers: q, [outputs, inputs].
    zeros, factors: z and s, [outputs, groups].
    columns: the group of each input, [inputs].
    """
    import torch

    plain = torch.empty(numbers.shape, dtype=torch.float32)
    for start in range(0, len(numbers), _ROWS):
        rows = slice(start, start + _ROWS)
        less = numbers[rows].float() - zeros[rows].float()[:, columns]
        plain[rows] = less * factors[rows].float()[:, columns]
    return plain


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack `count` integers of `bits` bits per row. words: [rows, words] int32. Returns [rows, count] uint8."""
    import torch

    held = _WORD // bits
    numbers = torch.empty(*words.shape, held, dtype=torch.uint8)
    for place in range(held):
        numbers[..., place] = words >> place * bits & (2**bits - 1)
    return numbers.flatten(1)[:, :count]


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // _WORD)


def _part(stem: str, parts: Parts, kind: str) -> LazyTensor:
    if kind not in parts:
        raise layout_error(f"{stem}weight", f"{stem}{kind} is missing", "copy or download the model again")
    return parts[kind]


def _unlike(name: str, numbers: LazyTensor, *others: LazyTensor) -> Exception:
    shapes = " and ".join(str(list(one.shape)) for one in others)
    return layout_error(name, f"has shape {list(numbers.shape)}, but its zero points and scales have {shapes}")


# Per format: the function that decodes a layer, and the tensors that show that a layer is quantized.
_FORMS: Mapping[str, tuple[Callable[[str, Parts, Mapping[str, Any]], LazyTensor], frozenset[str]]] = {
    "gptq": (_gptq, frozenset({"qweight"})),
    "awq": (_awq, frozenset({"qweight"})),
    "compressed-tensors": (_compressed, frozenset({"weight_packed", "weight_scale"})),
}
# Stored tensors that the decoded weight replaces.
_OWN = {"weight", "qweight", "qzeros", "scales", "g_idx"} | {
    f"weight_{kind}" for kind in ("packed", "shape", "scale", "zero_point", "g_idx")
}
