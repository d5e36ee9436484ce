"""Rules for whole models: wrappers' pieces in names, fused matrices, turned matrices, heads.

Each function takes all tensors, unread, and its settings, and returns all tensors; `surefoot.models.convert.rules` says
which undoes which. One that does not fit raises InputError.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from surefoot.models.convert.naming import in_layers, renamed, require_free
from surefoot.models.convert.tensors import LazyTensor, Tensors, is_zero, joined, part, same_bits, turned, zeros
from surefoot.system.errors import Fault, InputError

Settings = Mapping[str, Any]


def unwrap(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """Take `piece` out behind each module of `at` ("" is the front), of all names but those that begin as in `but`."""
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
    if renamed(changed, lambda name: _wrapped(name, settings)).keys() != tensors.keys():
        what = f"{piece} stands in some names and not in others of the same module"
        raise InputError(Fault("", what, "the names come from two layouts; save the model again in one"))
    return changed


def wrap(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    return renamed(tensors, lambda name: _wrapped(name, settings))


def _wrapped(name: str, settings: Settings) -> str:
    if name.startswith(tuple(settings["but"])):
        return name
    for place in sorted(settings["at"], key=len, reverse=True):  # inner ones first: the outer names then still fit
        if not place:
            name = f"{settings['piece']}.{name}"
        elif name.startswith(place + "."):
            name = f"{place}.{settings['piece']}.{name.removeprefix(place + '.')}"
    return name


def split(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """`fused` of every layer into `parts`, in that order along `dim` of the weight; biases have one dimension."""
    pattern = in_layers(settings["layers"], [settings["fused"]])
    sizes = settings["sizes"]
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if not (found := pattern.fullmatch(name)):
            result[name] = tensor
            continue
        dim = settings["dim"] if len(tensor.shape) == 2 else 0
        if tensor.shape[dim] != sum(sizes):
            what = f"is {list(tensor.shape)}: {' + '.join(map(str, sizes))} do not fit"
            raise InputError(Fault(name, what, "the config belongs to another model"))
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
            raise InputError(Fault(new, f"cannot be put together: {front}.{missing[0]}.{kind} is missing"))
        members = [group[path] for path in parts]
        dim = settings["dim"] if len(members[0].shape) == 2 else 0
        widths = [tensor.shape[dim] for tensor in members]
        rest = {tuple(size for d, size in enumerate(tensor.shape) if d != dim) for tensor in members}
        if widths != list(sizes) or len(rest) > 1 or len({tensor.dtype for tensor in members}) > 1:
            what = "cannot be put together: its parts differ in dtype or do not have the sizes that the config gives"
            raise InputError(Fault(new, what))
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
        what = f"differs from {embedding}, and the config ties them"
        raise InputError(Fault(head, what, "set tie_word_embeddings to false in config.json"))
    return {name: tensor for name, tensor in tensors.items() if name != head}


def copy_head(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    require_free(settings["head"], tensors)
    return {**tensors, settings["head"]: tensors[settings["embedding"]]}


def add_value_bias(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    """v_head.weight [1, hidden] -> v_head.summary.weight and a bias of zero, [1]."""
    weight = tensors["v_head.weight"]
    rest = {name: tensor for name, tensor in tensors.items() if name != "v_head.weight"}
    return {**rest, "v_head.summary.weight": weight, "v_head.summary.bias": zeros((1,), weight.dtype)}


def drop_value_bias(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    summary = {"v_head.summary.weight", "v_head.summary.bias"}
    if "v_head.summary.bias" in tensors and not is_zero(tensors["v_head.summary.bias"]):
        what = "is not zero, and a DeepSpeed-Chat value head has no bias"
        raise InputError(Fault("v_head.summary.bias", what, "keep it in the layout hf"))
    rest = {name: tensor for name, tensor in tensors.items() if name not in summary}
    return {**rest, "v_head.weight": tensors["v_head.summary.weight"]}


def drop_buffers(tensors: Tensors, settings: Settings) -> dict[str, LazyTensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in settings["names"]}
