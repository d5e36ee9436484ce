"""`finetuning_type: freeze`: the parameters that train, as patterns of module names (`model.trained`), and back.

LLaMA-Factory trains a parameter if its name contains ".LAYER.MODULE" for one of its layers and modules, ".LAYER." for
all of a layer, or the name of an extra module: a piece of a name, so that `norm` is also in input_layernorm. Facts:
`_setup_freeze_tuning` of LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from surefoot.interop.backward import Ours
from surefoot.interop.draft import Draft
from surefoot.system.errors import InputError

SETTINGS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_ALL = r"(\..*)?"  # what follows a layer's number if all of it trains
_OF_LAYERS = re.compile(r"\.\*\\\.\((\d+(?:\|\d+)*)\)(?:\\\.(.+)\.\*|\(\\\.\.\*\)\?)")
_EXTRA = re.compile(r"\.\*(.+)\.\*")


def set_trained(draft: Draft) -> None:
    try:
        layers = _numbers(draft)
    except ValueError as error:
        name, what, fix = error.args
        draft.refuse(name, what, fix)
        return
    modules, extra = draft["freeze_trainable_modules"], draft["freeze_extra_modules"] or []
    draft.note("finetuning_type", "carried", "", "model.trained")
    if found := patterns(layers, modules, extra):
        draft.set("model.trained", found, *SETTINGS)
    else:
        draft.refuse("freeze_trainable_layers", "no layer trains, and no extra module", "give a number other than 0")


def patterns(layers: Sequence[int], modules: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the patterns of the modules that train. A module that is not there is one without a match, as there."""
    numbers = "|".join(map(str, layers))
    inside = [_ALL] if "all" in modules else [rf"\.{re.escape(module)}.*" for module in modules]
    return [*(rf".*\.({numbers}){one}" for one in inside if layers), *(f".*{re.escape(module)}.*" for module in extra)]


def _numbers(draft: Draft) -> range:
    """Return the layers that train. Raises ValueError with a setting, what is wrong with it, and what to do."""
    name, wanted, spread = "freeze_trainable_layers", draft["freeze_trainable_layers"], draft["use_llama_pro"]
    if spread and wanted < 1:
        raise ValueError(name, f"expected a number from 1 with use_llama_pro, got {wanted}", "")
    if wanted <= 0:
        return range(-wanted)
    model = draft["model_name_or_path"]
    try:
        config = json.loads(draft.options.read(f"{model}/config.json"))
        config = config.get("text_config", config)
        count = next(int(config[key]) for key in _LAYERS if config.get(key))
    except (InputError, ValueError, TypeError, AttributeError, StopIteration):
        what = "counts layers from the last, and the model's config.json, which has their number, cannot be read here"
        raise ValueError(name, what, "download the model first, or give a negative number: the first layers") from None
    if spread and count % wanted:
        raise ValueError(name, f"use_llama_pro needs a divisor of the model's {count} layers, got {wanted}", "")
    return range(count // wanted - 1, count, count // wanted) if spread else range(max(0, count - wanted), count)


def _read(ours: Ours) -> tuple[list[int], list[str], list[str]] | None:
    """Return layers, modules and extra modules if `patterns` writes model.trained from them."""
    trained = ours["model.trained"] or []
    inside = [found for one in trained if (found := _OF_LAYERS.fullmatch(one))]
    layers = [int(number) for number in inside[0][1].split("|")] if inside else []
    modules = [_plain(found[2]) if found[2] else "all" for found in inside]
    extra = [_plain(found[1]) for one in trained if not _OF_LAYERS.fullmatch(one) and (found := _EXTRA.fullmatch(one))]
    return (layers, modules, extra) if trained and patterns(layers, modules, extra) == trained else None


def _plain(escaped: str) -> str:
    return re.sub(r"\\(.)", r"\1", escaped)


def kind(ours: Ours) -> str:
    """finetuning_type"""
    return "lora" if ours["adapter"] else "freeze" if _read(ours) else "full"


def number(ours: Ours) -> int | None:
    """The first layers as a negative number, others as the last ones or, with gaps, as those of use_llama_pro."""
    found = _read(ours)
    return None if found is None else -len(found[0]) if found[0][:1] == [0] else len(found[0])


def spread(ours: Ours) -> bool:
    layers = found[0] if (found := _read(ours)) else []
    return len(layers) > 1 and layers[1] - layers[0] > 1


def modules(ours: Ours) -> str | None:
    return ",".join(found[1]) or None if (found := _read(ours)) else None


def extra(ours: Ours) -> str | None:
    return ",".join(found[2]) or None if (found := _read(ours)) else None
