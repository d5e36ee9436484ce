"""From the names and shapes of an adapter's state dict to the rules that lead to PEFT's own, and its config with them.

Two steps, for the second needs the base model: `recognise_adapter` finds PEFT's names, `fit_to_base` the modules that
the base has. Where a rule changes which modules carry the adapter, `adapter_config.json` changes with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.models.convert.recognise import WRAPPERS, Conversion, Group, Target, groups, places
from surefoot.models.convert.rules import OLD_MAGNITUDE, Rule, is_stacked, shares_a
from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error, some

PEFT_FRONT = "base_model.model"
_NAMED = re.compile(
    r"\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save)\.(?!weight$|bias$)([^.]+)"
)
_PART = re.compile(r"\.(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|weight_m_wdecomp|modules_to_save)\b")
_IN_LAYER = re.compile(r"\.\d+\.(?:.+\.)?weight$")
_ORIGINAL = "original_module"  # PEFT's name for what a module of modules_to_save was
# Of the first DoRA code and of PEFT 0.3. Those that hold something here would change the result.
_OLD_SETTINGS = ("merge_weights", "enable_lora", "Wdecompose_target_modules")
_TRAINING_ONLY = ("dora_simple",)
_EDGES = 3  # neighbours of a float that are tried for alpha


@dataclass(frozen=True)
class RecognisedAdapter:
    """What an adapter's state dict was recognised as.

    layouts: () for PEFT's own.
    rules: in order to apply.
    tensors: after them.
    config: settings of adapter_config.json, changed where a rule changes what they describe.
    """

    layouts: tuple[str, ...]
    rules: tuple[Rule, ...]
    tensors: Mapping[str, LazyTensor]
    config: Mapping[str, Any]


def halves(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """The base's weights and the adapter's, of a state dict that may hold both; no base where it is an adapter alone.

    config: adapter_config.json's, {} where there is none. PEFT saves modules that `modules_to_save` names, resized
    embeddings and biases under the base's own names, so those are no base: only a matrix of a decoder layer is.
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


def recognise_adapter(tensors: Tensors, config: Mapping[str, Any], where: str) -> RecognisedAdapter:
    """The way to PEFT's names.

    config: adapter_config.json's.
    Raises InputError for what is unknown or ambiguous.
    """
    conversion = Conversion(tensors)
    for piece in ("module", *WRAPPERS):
        at = sorted({place for name in conversion.tensors for place in places(name, piece)})
        if piece not in WRAPPERS:  # "module" can be a module's own name within
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
        what = f"holds {len(adapters)} adapters: {', '.join(adapters)}"
        raise layout_error(where, what, "save the one that you want with PEFT's save_pretrained")
    if adapters:
        conversion.change("live-peft", Rule("unname adapter", {"name": adapters[0]}))
    if any(name.endswith(OLD_MAGNITUDE) for name in conversion.tensors):
        conversion.change("old-dora", Rule("new magnitude", {}))
    modern = _modern(config, where, dora="old-dora" in conversion.layouts)
    return RecognisedAdapter(tuple(conversion.layouts), tuple(conversion.rules), conversion.tensors, modern)


def fit_to_base(adapter: RecognisedAdapter, target: Target, where: str) -> RecognisedAdapter:
    """The adapter on the modules that the base has. Raises InputError where that cannot be exact."""
    config = dict(adapter.config)
    conversion = Conversion(adapter.tensors, adapter.layouts, adapter.rules)
    for group in groups(target):
        rule = regrouping(conversion.tensors, group, fuse=group.own_is_fused)
        if rule is not None:
            config = regrouped_config(config, rule, where)
            conversion.change("split" if group.own_is_fused else "fused", rule)
    return RecognisedAdapter(tuple(conversion.layouts), tuple(conversion.rules), conversion.tensors, config)


def regrouping(tensors: Tensors, group: Group, *, fuse: bool) -> Rule | None:
    """The rule that brings the adapters of the group together or, without `fuse`, apart; None where they are so."""

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
    """adapter_config.json after `rule`: other targets and, in the stacked form, another rank with alpha / rank kept.

    A rank or alpha that a pattern gives the modules before goes with them, and is none of a pattern's where it is the
    config's own. Raises InputError where a pattern cannot be followed.
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
            what = (
                f"rank {old} of {fused} is not a multiple of {len(parts)}, and its matrices are of {len(parts)} parts"
            )
            raise layout_error(where, what, "the config and the weights are of two adapters")
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
    """The one value that `gone` have by the pattern, whose keys must name them as they are or not at all."""
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
    """The alpha with which alpha / rank, or alpha / sqrt(rank), is the same float as before."""

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
    """The settings of the first DoRA code and of PEFT 0.3 as PEFT's today."""
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
