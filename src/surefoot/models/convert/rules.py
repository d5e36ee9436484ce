"""Rules: exact changes of names and shapes, each with an exact inverse.

A rule is a kind (a row of KINDS) with settings in plain JSON, so that `convert.json` records what was done, and
`inverse` undoes it with the same settings. Rules work on lazy tensors (`surefoot.models.convert.tensors`). A rule that
does not match its tensors raises InputError and changes nothing: no name is dropped, no value rounded.

    rule = Rule("unwrap", {"piece": "_orig_mod", "at": [""], "but": []})
    apply(inverse(rule), apply(rule, tensors)) == tensors

Adapters are converted from and to the names that PEFT saves:

    base_model.model.<module>.lora_A.weight [r, inputs]   lora_B.weight [outputs, r]   lora_magnitude_vector [outputs]

LoRA adds s B A to a weight; rows of a fused matrix get s B[rows] A. So a fused adapter can be split exactly: the parts
share A. Fusing is exact in two cases: the parts share A bit for bit (B is stacked); or they do not, and the fused rank
is the sum of theirs (A is stacked, B is block-diagonal, and alpha grows like the rank, which keeps s). DoRA's
magnitudes are per row of the weight, so they are split with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from surefoot.models.convert.tensors import (
    LazyTensor,
    Tensors,
    in_layers,
    is_zero,
    joined,
    layout_error,
    part,
    renamed,
    require_free,
    reshaped,
    same_bits,
    turned,
    zeros,
)

Settings = Mapping[str, Any]


def unwrap(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Remove the component `piece` after each module in `at` ("": at the beginning), except in names starting with one
    of `but`."""
    piece, places = settings["piece"], set(settings["at"])

    def rename(name: str) -> str:
        if name.startswith(tuple(settings["but"])):
            return name
        kept, rest = "", name
        while rest:
            if kept in places and rest.startswith(piece + "."):
                rest = rest.removeprefix(piece + ".")
                continue
            component, _, rest = rest.partition(".")
            kept = f"{kept}.{component}" if kept else component
        return kept

    changed = renamed(tensors, rename)
    if wrap(changed, settings).keys() != tensors.keys():
        what = f"{piece} is in some names of a module and not in others"
        raise layout_error("", what, "the names come from two layouts; save the model again in one")
    return changed


def wrap(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Insert the component `piece` after each module in `at`; the inverse of `unwrap`."""

    def rename(name: str) -> str:
        if name.startswith(tuple(settings["but"])):
            return name
        for place in sorted(settings["at"], key=len, reverse=True):  # inner ones first: the outer names then still fit
            if not place:
                name = f"{settings['piece']}.{name}"
            elif name.startswith(place + "."):
                name = f"{place}.{settings['piece']}.{name.removeprefix(place + '.')}"
        return name

    return renamed(tensors, rename)


def split(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Split `fused` in every layer into `parts`, in this order along `dim` of the weight; of a bias along dim 0."""
    pattern = in_layers(settings["layers"], [settings["fused"]])
    sizes = settings["sizes"]
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if not (found := pattern.fullmatch(name)):
            result[name] = tensor
            continue
        dim = settings["dim"] if len(tensor.shape) == 2 else 0
        if tensor.shape[dim] != sum(sizes):
            what = f"has shape {list(tensor.shape)}, but its parts need {' + '.join(map(str, sizes))}"
            raise layout_error(name, what, "the config belongs to another model")
        stops = list(accumulate(sizes))
        for path, size, stop in zip(settings["parts"], sizes, stops, strict=True):
            new = f"{found['front']}.{path}.{found['kind']}"
            require_free(new, tensors)
            result[new] = part(tensor, dim, stop - size, stop)
    return result


def fuse(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    parts, sizes = settings["parts"], settings["sizes"]
    pattern = in_layers(settings["layers"], parts)
    groups: dict[tuple[str, str], dict[str, LazyTensor]] = {}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if found := pattern.fullmatch(name):
            groups.setdefault((found["front"], found["kind"]), {})[found["path"]] = tensor
        else:
            result[name] = tensor
    for (front, kind), group in groups.items():
        new = f"{front}.{settings['fused']}.{kind}"
        require_free(new, tensors)
        if missing := [path for path in parts if path not in group]:
            raise layout_error(new, f"cannot be fused: {front}.{missing[0]}.{kind} is missing")
        members = [group[path] for path in parts]
        dim = settings["dim"] if len(members[0].shape) == 2 else 0
        widths = [tensor.shape[dim] for tensor in members]
        rest = {tuple(size for d, size in enumerate(tensor.shape) if d != dim) for tensor in members}
        if widths != list(sizes) or len(rest) > 1 or len({tensor.dtype for tensor in members}) > 1:
            what = "cannot be fused: its parts differ in dtype or do not have the sizes in the config"
            raise layout_error(new, what)
        result[new] = joined(members, dim)
    return result


def transpose(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    pattern = in_layers(settings["layers"], settings["modules"])
    return {
        name: turned(tensor) if len(tensor.shape) == 2 and pattern.fullmatch(name) else tensor
        for name, tensor in tensors.items()
    }


def drop_head(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    head, embedding = settings["head"], settings["embedding"]
    if not same_bits(tensors[head], tensors[embedding]):
        what = f"differs from {embedding}, but the config ties them"
        raise layout_error(head, what, "set tie_word_embeddings to false in config.json")
    return {name: tensor for name, tensor in tensors.items() if name != head}


def copy_head(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    require_free(settings["head"], tensors)
    return {**tensors, settings["head"]: tensors[settings["embedding"]]}


def add_value_bias(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Convert v_head.weight [1, hidden] to v_head.summary.weight, and add a zero bias [1]."""
    weight = tensors["v_head.weight"]
    rest = {name: tensor for name, tensor in tensors.items() if name != "v_head.weight"}
    return {**rest, "v_head.summary.weight": weight, "v_head.summary.bias": zeros((1,), weight.dtype)}


def drop_value_bias(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    summary = {"v_head.summary.weight", "v_head.summary.bias"}
    if "v_head.summary.bias" in tensors and not is_zero(tensors["v_head.summary.bias"]):
        what = "is not zero, but a DeepSpeed-Chat value head has no bias"
        raise layout_error("v_head.summary.bias", what, "keep it in the layout hf")
    rest = {name: tensor for name, tensor in tensors.items() if name not in summary}
    return {**rest, "v_head.weight": tensors["v_head.summary.weight"]}


def drop_buffers(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in settings["names"]}


OLD_MAGNITUDE = ".weight_m_wdecomp.weight"  # [outputs, 1]
MAGNITUDE = ".lora_magnitude_vector"  # [outputs]


def unname_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Remove the adapter's name as PEFT does when it saves: `lora_A.default.weight` -> `lora_A.weight`."""
    name = re.escape(settings["name"])

    def rename(key: str) -> str:
        key = re.sub(rf"\.lora_magnitude_vector\.{name}\.weight$", MAGNITUDE, key)
        key = re.sub(rf"\.(lora_[AB])\.{name}\.(weight|bias)$", r".\1.\2", key)
        key = re.sub(rf"\.(lora_embedding_[AB])\.{name}$", r".\1", key)
        return re.sub(rf"\.modules_to_save\.{name}\.", ".", key)

    changed = renamed(tensors, rename)
    if name_adapter(changed, settings).keys() != tensors.keys():
        what = f"some names contain the adapter's name {settings['name']} and others do not"
        raise layout_error("", what, "the names come from two layouts; save the adapter again in one")
    return changed


def name_adapter(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Insert the adapter's name; the inverse of `unname_adapter`."""
    name = settings["name"]

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
                raise layout_error(name, f"has shape {list(tensor.shape)}, not [outputs, 1]")
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
            raise layout_error(whole, f"has {b.shape[0]} outputs, but its parts need {' + '.join(map(str, sizes))}")
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
            what = f"has no adapter, but {front}.{fused} needs one for all its rows"
            raise layout_error(missing[0], what, f"train an adapter on all of {', '.join(parts)}, or merge it")
        a = [result.pop(f"{member}.lora_A.weight") for member in members]
        b = [result.pop(f"{member}.lora_B.weight") for member in members]
        magnitudes = [one for member in members if (one := result.pop(f"{member}{MAGNITUDE}", None)) is not None]
        if [one.shape[0] for one in b] != list(sizes) or len({(one.shape, one.dtype) for one in a}) > 1:
            raise layout_error(f"{front}.{fused}", "cannot be fused: ranks, dtypes or sizes differ")
        whole = f"{front}.{fused}"
        if settings["stacked"]:
            rank = a[0].shape[0]
            result[f"{whole}.lora_A.weight"] = joined(a, 0)
            result[f"{whole}.lora_B.weight"] = joined([_placed(one, k, len(b), rank) for k, one in enumerate(b)], 0)
        else:
            if not all(same_bits(a[0], other) for other in a[1:]):
                what = "cannot be fused at this rank: the parts have different A"
                raise layout_error(whole, what, "use the stacked form, whose rank is the sum of theirs")
            result[f"{whole}.lora_A.weight"], result[f"{whole}.lora_B.weight"] = a[0], joined(b, 0)
        if magnitudes:
            result[f"{whole}{MAGNITUDE}"] = joined(magnitudes, 0)
    return result


def _placed(b: LazyTensor, block: int, blocks: int, rank: int) -> LazyTensor:
    """Return B as a row of a block-diagonal matrix: [size, rank] -> [size, blocks · rank], zeros in other blocks."""
    before, after = (zeros((b.shape[0], count * rank), b.dtype) for count in (block, blocks - 1 - block))
    return joined([before, b, after], 1)


def is_stacked(tensors: Tensors, fused: str, sizes: list[int]) -> bool:
    """Whether every B on `fused` is block-diagonal, so that each part has its own A."""
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
    """Whether all `parts` have adapters and their A are equal bit for bit, in every layer."""
    first, *others = parts
    fronts = [name.removesuffix(end) for name in tensors if name.endswith(end := f".{first}.lora_A.weight")]
    return all(
        (other := tensors.get(f"{front}.{path}.lora_A.weight")) is not None
        and same_bits(tensors[f"{front}.{first}.lora_A.weight"], other)
        for front in fronts
        for path in others
    )


@dataclass(frozen=True)
class Rule:
    """One exact change, as data.

    kind: a row of KINDS.
    settings: parameters as JSON values, the same as of its inverse.
    """

    kind: str
    settings: Settings


@dataclass(frozen=True)
class Kind:
    """A kind of rule.

    inverse: the kind that undoes it; None if it drops tensors.
    sentence: description for users.
    """

    inverse: str | None
    sentence: str
    change: Callable[[Tensors, Settings], dict[str, LazyTensor]]


def apply(rule: Rule, tensors: Tensors) -> dict[str, LazyTensor]:
    """Return the tensors after `rule`. Raises InputError if it does not match them."""
    return KINDS[rule.kind].change(tensors, rule.settings)


def inverse(rule: Rule) -> Rule:
    """Return the rule that undoes `rule` bit for bit. Raises InputError if there is none."""
    kind = KINDS[rule.kind].inverse
    if kind is None:
        raise layout_error(rule.kind, "has no inverse: it drops tensors")
    return Rule(kind, rule.settings)


KINDS: dict[str, Kind] = {
    "unwrap": Kind("wrap", "removes a wrapper's prefix from the names", unwrap),
    "wrap": Kind("unwrap", "adds a wrapper's prefix to the names", wrap),
    "split": Kind("fuse", "splits a fused matrix and its bias into their parts", split),
    "fuse": Kind("split", "concatenates the parts of a fused matrix and its bias", fuse),
    "transpose": Kind("transpose", "transposes the weights of linear layers, as in Conv1D", transpose),
    "drop tied head": Kind("copy tied head", "removes an output head that is equal to the embedding", drop_head),
    "copy tied head": Kind("drop tied head", "writes the embedding again as output head", copy_head),
    "add value bias": Kind("drop value bias", "adds a zero bias to a value head without bias", add_value_bias),
    "drop value bias": Kind("add value bias", "removes a value head's zero bias", drop_value_bias),
    "drop buffers": Kind(None, "removes tables that the model computes itself", drop_buffers),
    "unname adapter": Kind("name adapter", "removes the adapter's name from the names", unname_adapter),
    "name adapter": Kind("unname adapter", "adds the adapter's name to the names", name_adapter),
    "new magnitude": Kind("old magnitude", "renames DoRA's magnitudes, [outputs, 1] to [outputs]", new_magnitude),
    "old magnitude": Kind("new magnitude", "renames DoRA's magnitudes, [outputs] to [outputs, 1]", old_magnitude),
    "split adapter": Kind("fuse adapter", "splits the adapter of a fused matrix", split_adapter),
    "fuse adapter": Kind("split adapter", "concatenates the adapters of its parts", fuse_adapter),
}
