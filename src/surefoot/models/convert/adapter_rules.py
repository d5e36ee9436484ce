"""Rules for LoRA and DoRA adapters. Names as PEFT saves them are the middle of all layouts:

    base_model.model.<module>.lora_A.weight [r, inputs]   lora_B.weight [outputs, r]   lora_magnitude_vector [outputs]

LoRA adds s B A to a weight. On rows of a fused matrix that is s B[rows] A: a fused adapter is split exactly, its parts
sharing A. The way back is exact in two cases: the parts share A bit for bit (B is stacked), or they do not and the
fused rank is the sum of theirs (A is stacked, B block-diagonal, and alpha grows like the rank, so that s stays). DoRA's
magnitudes and norms are by rows of the weight, so they go with the rows.
"""

from __future__ import annotations

import re
from itertools import accumulate

from surefoot.models.convert.model_rules import Settings
from surefoot.models.convert.naming import renamed
from surefoot.models.convert.tensors import LazyTensor, Tensors, is_zero, joined, part, reshaped, same_bits, zeros
from surefoot.system.errors import Fault, InputError

OLD_MAGNITUDE = ".weight_m_wdecomp.weight"  # [outputs, 1]
MAGNITUDE = ".lora_magnitude_vector"  # [outputs]


def unname_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """`lora_A.default.weight` -> `lora_A.weight`; of magnitudes and modules saved whole more goes, as in PEFT."""
    name = re.escape(settings["name"])

    def rename(key: str) -> str:
        key = re.sub(rf"\.lora_magnitude_vector\.{name}\.weight$", MAGNITUDE, key)
        key = re.sub(rf"\.(lora_[AB])\.{name}\.(weight|bias)$", r".\1.\2", key)
        key = re.sub(rf"\.(lora_embedding_[AB])\.{name}$", r".\1", key)
        return re.sub(rf"\.modules_to_save\.{name}\.", ".", key)

    changed = renamed(tensors, rename)
    if _with_name(changed, settings["name"]).keys() != tensors.keys():
        what = f"some names hold the adapter's name {settings['name']} and others do not"
        raise InputError(Fault("", what, "the names come from two layouts; save the adapter again in one"))
    return changed


def name_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """The way back."""
    return _with_name(tensors, settings["name"])


def _with_name(tensors: Tensors, name: str) -> dict[str, LazyTensor]:
    def rename(key: str) -> str:
        if key.endswith(MAGNITUDE):
            return f"{key}.{name}.weight"
        if found := re.fullmatch(r"(.+\.lora_[AB])\.(weight|bias)", key):
            return f"{found[1]}.{name}.{found[2]}"
        if re.search(r"\.lora_embedding_[AB]$", key):
            return f"{key}.{name}"
        module, _, kind = key.rpartition(".")
        return f"{module}.modules_to_save.{name}.{kind}"

    return renamed(tensors, rename)


def new_magnitude(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(OLD_MAGNITUDE):
            if len(tensor.shape) != 2 or tensor.shape[1] != 1:
                raise InputError(Fault(name, f"is {list(tensor.shape)}, not [outputs, 1]"))
            result[name.removesuffix(OLD_MAGNITUDE) + MAGNITUDE] = reshaped(tensor, tensor.shape[:1])
        else:
            result[name] = tensor
    return result


def old_magnitude(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(MAGNITUDE):
            name, tensor = name.removesuffix(MAGNITUDE) + OLD_MAGNITUDE, reshaped(tensor, (*tensor.shape, 1))
        result[name] = tensor
    return result


def split_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    fused, parts, sizes = settings["fused"], settings["parts"], settings["sizes"]
    result = dict(tensors)
    for front in sorted({name.partition(f".{fused}.")[0] for name in tensors if f".{fused}.lora_" in name}):
        whole = f"{front}.{fused}"
        a, b = result.pop(f"{whole}.lora_A.weight"), result.pop(f"{whole}.lora_B.weight")
        magnitude = result.pop(f"{whole}{MAGNITUDE}", None)
        if b.shape[0] != sum(sizes):
            raise InputError(Fault(whole, f"has {b.shape[0]} outputs: {' + '.join(map(str, sizes))} do not fit"))
        blocks = settings["stacked"]
        rank = a.shape[0] // len(parts)
        for number, (path, size, stop) in enumerate(zip(parts, sizes, accumulate(sizes), strict=True)):
            new, rows = f"{front}.{path}", part(b, 0, stop - size, stop)
            if blocks:
                result[f"{new}.lora_A.weight"] = part(a, 0, number * rank, (number + 1) * rank)
                rows = part(rows, 1, number * rank, (number + 1) * rank)
            else:
                result[f"{new}.lora_A.weight"] = a
            result[f"{new}.lora_B.weight"] = rows
            if magnitude is not None:
                result[f"{new}{MAGNITUDE}"] = part(magnitude, 0, stop - size, stop)
    return result


def fuse_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    fused, parts, sizes = settings["fused"], settings["parts"], settings["sizes"]
    result = dict(tensors)
    fronts = {name.partition(f".{path}.")[0] for path in parts for name in tensors if f".{path}.lora_" in name}
    for front in sorted(fronts):
        members = [f"{front}.{path}" for path in parts]
        if missing := [member for member in members if f"{member}.lora_A.weight" not in tensors]:
            what = f"has no adapter, and {front}.{fused} takes one for all its rows"
            raise InputError(Fault(missing[0], what, f"train an adapter on all of {', '.join(parts)}, or merge it"))
        a = [result.pop(f"{member}.lora_A.weight") for member in members]
        b = [result.pop(f"{member}.lora_B.weight") for member in members]
        magnitudes = [one for member in members if (one := result.pop(f"{member}{MAGNITUDE}", None)) is not None]
        if [one.shape[0] for one in b] != list(sizes) or len({(one.shape, one.dtype) for one in a}) > 1:
            raise InputError(Fault(f"{front}.{fused}", "cannot be put together: ranks, dtypes or sizes differ"))
        whole = f"{front}.{fused}"
        if settings["stacked"]:
            rank = a[0].shape[0]
            result[f"{whole}.lora_A.weight"] = joined(a, 0)
            result[f"{whole}.lora_B.weight"] = joined([_placed(one, k, len(b), rank) for k, one in enumerate(b)], 0)
        else:
            if not all(same_bits(a[0], other) for other in a[1:]):
                what = "cannot be put together at this rank: the parts have different A"
                raise InputError(Fault(whole, what, "use the stacked form, whose rank is the sum of theirs"))
            result[f"{whole}.lora_A.weight"], result[f"{whole}.lora_B.weight"] = a[0], joined(b, 0)
        if magnitudes:
            result[f"{whole}{MAGNITUDE}"] = joined(magnitudes, 0)
    return result


def _placed(b: LazyTensor, block: int, blocks: int, rank: int) -> LazyTensor:
    """[size, rank] -> [size, blocks · rank]: zero but for its own columns."""
    before, after = (
        zeros((b.shape[0], block * rank), b.dtype),
        zeros((b.shape[0], (blocks - 1 - block) * rank), b.dtype),
    )
    return joined([before, b, after], 1)


def is_stacked(tensors: Tensors, fused: str, sizes: list[int]) -> bool:
    """Whether every B on `fused` is block-diagonal, so that its parts have an A of their own."""
    found = [tensor for name, tensor in tensors.items() if name.endswith(f".{fused}.lora_B.weight")]
    return bool(found) and all(_block_diagonal(b, sizes) for b in found)


def _block_diagonal(b: LazyTensor, sizes: list[int]) -> bool:
    if b.shape[1] % len(sizes) or b.shape[0] != sum(sizes):
        return False
    rank = b.shape[1] // len(sizes)
    for number, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        rows = part(b, 0, stop - size, stop)
        if not is_zero(part(rows, 1, 0, number * rank)) or not is_zero(part(rows, 1, (number + 1) * rank, b.shape[1])):
            return False
    return True


def shares_a(tensors: Tensors, parts: list[str]) -> bool:
    """Whether, wherever all `parts` have an adapter, their A are one, bit for bit."""
    first, *others = parts
    fronts = [name.removesuffix(end) for name in tensors if name.endswith(end := f".{first}.lora_A.weight")]
    return all(
        (other := tensors.get(f"{front}.{path}.lora_A.weight")) is not None
        and same_bits(tensors[f"{front}.{first}.lora_A.weight"], other)
        for front in fronts
        for path in others
    )
