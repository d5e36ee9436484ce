"""Recognize the layout of an adapter's state dict from names and shapes, and find the rules that convert it to PEFT's.

Two steps, because only the second needs the base model: `recognize_adapter` converts to PEFT's names, `fit_to_base` to
the modules of the base. If a rule changes which modules have adapters, adapter_config.json changes accordingly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.models.convert.recognize import WRAPPERS, Conversion, Group, Target, groups, places
from surefoot.models.convert.rules import OLD_MAGNITUDE, Rule, is_stacked, shares_a
from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error, some

PEFT_FRONT = "base_model.model"
_NAMED = re.compile(
    r"\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save)\.(?!weight$|bias$)([^.]+)"
)
_PART = re.compile(r"\.(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|weight_m_wdecomp|modules_to_save)\b")
_IN_LAYER = re.compile(r"\.\d+\.(?:.+\.)?weight$")
_ORIGINAL = "original_module"  # PEFT's name for the untrained copy of a module in modules_to_save
# Settings of the original DoRA code and PEFT 0.3. If set, they would change the result.
_OLD_SETTINGS = ("merge_weights", "enable_lora", "Wdecompose_target_modules")
_TRAINING_ONLY = ("dora_simple",)
_EDGES = 3  # neighboring floats to try for alpha, in each direction


@dataclass(frozen=True)
class RecognizedAdapter:
    """Result of `recognize_adapter` and `fit_to_base`.

    layouts: names in `models.convert.layouts`; () for PEFT's own layout.
    rules: conversion rules, in the order of application.
    tensors: the weights after these rules.
    config: adapter_config.json after these rules.
    """

    layouts: tuple[str, ...]
    rules: tuple[Rule, ...]
    tensors: Mapping[str, LazyTensor]
    config: Mapping[str, Any]


def halves(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Separate a state dict into (base weights, adapter weights); either may be empty.

    config: content of adapter_config.json; {} if there is none.

    PEFT saves `modules_to_save`, resized embeddings and biases under the base's names. Therefore a base is recognized
    only by a matrix of a decoder layer.
    """
    trained = tuple(config.get("modules_to_save") or ())

    def is_part(name: str) -> bool:
        pieces = name.split(".")
        inside = any(".".join(pieces[:end]).endswith(trained) for end in range(1, len(pieces)))  # as PEFT matches
        return bool(_PART.search(name)) or (inside and _ORIGINAL not in pieces)

    adapter = {name: tensor for name, tensor in tensors.items() if is_part(name)}
    if not any(_PART.search(name) for name in adapter):
        return dict(tensors), {}
    base = {name: tensor for name, tensor in tensors.items() if name not in adapter}
    if any(_IN_LAYER.search(name) and len(tensor.shape) == 2 for name, tensor in base.items()):
        return base, adapter
    return {}, dict(tensors)


def recognize_adapter(tensors: Tensors, config: Mapping[str, Any], where: str) -> RecognizedAdapter:
    """Find how to convert the names to PEFT's.

    config: content of adapter_config.json.
    where: the place that errors name.

    Raises InputError if a name or setting is unknown or ambiguous.
    """
    if not tensors:
        what = "has no weights: it was saved after model.state_dict had been replaced, or by one process of several"
        raise layout_error(where, what, "save it again with PEFT's save_pretrained")
    conversion = Conversion(tensors)
    for piece in ("module", *WRAPPERS):
        at = sorted({place for name in conversion.tensors for place in places(name, piece)})
        if piece not in WRAPPERS:  # a module within the model may be called "module"
            at = [""] if all(name.startswith(f"{piece}.") for name in conversion.tensors) else []
        if at:
            conversion.change("wrapped", Rule("unwrap", {"piece": piece, "at": at, "but": []}))
    while all(name.startswith(f"{PEFT_FRONT}.{PEFT_FRONT}.") for name in conversion.tensors):
        conversion.change("wrapped", Rule("unwrap", {"piece": PEFT_FRONT, "at": [""], "but": []}))
    if not all(name.startswith(f"{PEFT_FRONT}.") for name in conversion.tensors):
        if any(name.startswith(f"{PEFT_FRONT}.") for name in conversion.tensors):
            outside = [name for name in conversion.tensors if not name.startswith(f"{PEFT_FRONT}.")]
            raise layout_error(where, f"{len(outside)} names do not begin with {PEFT_FRONT}: {some(outside)}")
        conversion.change("live-peft", Rule("wrap", {"piece": PEFT_FRONT, "at": [""], "but": []}))
    adapters = sorted({found[1] for name in conversion.tensors if (found := _NAMED.search(name))})
    if len(adapters) > 1:
        what = f"contains {len(adapters)} adapters: {', '.join(adapters)}"
        raise layout_error(where, what, "save one of them with PEFT's save_pretrained")
    if adapters:
        conversion.change("live-peft", Rule("unname adapter", {"name": adapters[0]}))
    if any(name.endswith(OLD_MAGNITUDE) for name in conversion.tensors):
        conversion.change("old-dora", Rule("new magnitude", {}))
    modern = _modern(config, where, dora="old-dora" in conversion.layouts)
    return RecognizedAdapter(tuple(conversion.layouts), tuple(conversion.rules), conversion.tensors, modern)


def fit_to_base(adapter: RecognizedAdapter, target: Target, where: str) -> RecognizedAdapter:
    """Convert the adapter to the modules of the base. Raises InputError if the result would not be exact."""
    config = dict(adapter.config)
    conversion = Conversion(adapter.tensors, adapter.layouts, adapter.rules)
    for group in groups(target):
        rule = regrouping(conversion.tensors, group, fuse=group.own_is_fused)
        if rule is not None:
            config = regrouped_config(config, rule, where)
            conversion.change("split" if group.own_is_fused else "fused", rule)
    return RecognizedAdapter(tuple(conversion.layouts), tuple(conversion.rules), conversion.tensors, config)


def regrouping(tensors: Tensors, group: Group, *, fuse: bool) -> Rule | None:
    """Return the rule that fuses the group's adapters, or with fuse=False splits them; None if that is done already."""

    def carries(path: str) -> bool:
        return any(f".{path}.lora_A." in name for name in tensors)

    settings: dict[str, Any] = {"sizes": list(group.sizes)}
    if fuse:
        parts = next((paths for paths in group.parts if any(map(carries, paths))), None)
        if parts is None:
            return None
        settings |= {"fused": group.fused[0], "parts": list(parts), "stacked": not shares_a(tensors, list(parts))}
        return Rule("fuse adapter", settings)
    fused = next((path for path in group.fused if carries(path)), None)
    if fused is None:
        return None
    stacked = is_stacked(tensors, fused, list(group.sizes))
    settings |= {"fused": fused, "parts": list(group.parts[0]), "stacked": stacked}
    return Rule("split adapter", settings)


def regrouped_config(config: Mapping[str, Any], rule: Rule, where: str) -> dict[str, Any]:
    """Return adapter_config.json after `rule`: new targets and, for the stacked form, a new rank with the same scale.

    Entries of rank_pattern and alpha_pattern move to the new modules; an entry equal to the config's own value is
    removed. Raises InputError if a pattern does not name the modules plainly.
    """
    config = dict(config)
    fused, parts = _leaf(rule.settings["fused"]), [_leaf(path) for path in rule.settings["parts"]]
    gone, come = ([fused], parts) if rule.kind == "split adapter" else (parts, [fused])
    targets = config.get("target_modules")
    if isinstance(targets, list):
        kept = [name for name in targets if _leaf(name) not in gone]
        if len(kept) == len(targets) or any("." in name for name in targets if name not in kept):
            raise layout_error(where, f"target_modules {targets} do not name {', '.join(gone)} plainly")
        config["target_modules"] = sorted({*kept, *come})
    elif isinstance(targets, str) and targets != "all-linear":
        raise layout_error(where, f"target_modules is a pattern, {targets!r}", "list the names of the modules")
    usual_rank, usual_alpha = config.get("r", 8), config.get("lora_alpha", 8)  # PEFT's own defaults
    old, alpha = (
        _of_pattern(config, pattern, usual, gone, come, where)
        for pattern, usual in (("rank_pattern", usual_rank), ("alpha_pattern", usual_alpha))
    )
    new = old
    if rule.settings["stacked"]:
        if rule.kind == "split adapter" and old % len(parts):
            what = f"rank {old} of {fused} is not a multiple of {len(parts)}, the number of its parts"
            raise layout_error(where, what, "config and weights belong to different adapters")
        new = old // len(parts) if rule.kind == "split adapter" else old * len(parts)
        alpha = _scaled_alpha(float(alpha), old, new, bool(config.get("use_rslora")), where)
    for pattern, value, usual in (("rank_pattern", new, usual_rank), ("alpha_pattern", alpha, usual_alpha)):
        others = {name: one for name, one in (config.get(pattern) or {}).items() if name not in gone}
        entries = others if value == usual else {**others, **dict.fromkeys(come, value)}
        if entries or pattern in config:
            config[pattern] = entries
    return config


def _of_pattern(
    config: Mapping[str, Any], pattern: str, usual: Any, gone: list[str], come: list[str], where: str
) -> Any:
    """Return the value that the pattern gives the modules `gone`. Raises InputError if they have different values, or
    if a key would match old or new modules only in some layers."""
    entries = config.get(pattern) or {}
    if unclear := sorted(name for name in entries if name not in gone and _leaf(name) in (*gone, *come)):
        what = f"{pattern} names {some(unclear)}, which would change"
        raise layout_error(where, what, f"name {', '.join(gone)} plainly, for all layers")
    values = {name: entries.get(name, usual) for name in gone}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        raise layout_error(where, f"{pattern} gives the parts of one matrix different values: {shown}")
    return values[gone[0]]


def _scaled_alpha(alpha: float, old: int, new: int, rslora: bool, where: str) -> float | int:
    """Return the alpha for rank `new` that gives exactly the same float alpha / rank (rsLoRA: alpha / sqrt(rank))."""

    def scale(alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if rslora else rank)

    candidate = alpha * (math.sqrt(new / old) if rslora else new / old)
    low = high = candidate
    for _ in range(_EDGES + 1):
        for value in (low, high):
            if scale(value, new) == scale(alpha, old):
                return int(value) if value.is_integer() else value
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    raise layout_error(where, f"no alpha keeps the scale {scale(alpha, old)!r} at rank {new}")


def _modern(config: Mapping[str, Any], where: str, dora: bool) -> dict[str, Any]:
    """Convert settings of the original DoRA code and PEFT 0.3 to those of current PEFT."""
    result = dict(config)
    if unknown := [f"{key}: {result[key]!r}" for key in _OLD_SETTINGS if result.get(key)]:
        raise layout_error(where, f"{', '.join(unknown)}: not supported", "only plain LoRA and DoRA are converted")
    for key in (*_OLD_SETTINGS, *_TRAINING_ONLY):
        result.pop(key, None)
    if str(result.get("peft_type")).upper() == "DORA":
        result["peft_type"] = "LORA"
        result["use_dora"] = True
    if dora and result:
        result["use_dora"] = True
    return result


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
