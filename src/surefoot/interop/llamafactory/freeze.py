"""`finetuning_type: freeze`: the parameters that train, as patterns of module names (`model.trained`), and back.

LLaMA-Factory trains a parameter if its name contains ".LAYER.MODULE" for one of its layers and modules, ".LAYER." for
all of a layer, or the name of an extra module: a piece of a name, so that `norm` is also in input_layernorm. Facts:
`_setup_freeze_tuning` of LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from surefoot.interop.backward import Back, Ours
from surefoot.interop.draft import Draft
from surefoot.interop.launch import Options
from surefoot.system.errors import InputError

SETTINGS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_ALL = r"(\..*)?"  # what follows a layer's number if all of it trains
_NUMBERS = r"\d+(?:\|\d+)*|last \d+|last of \d+ parts"
_OF_LAYERS = re.compile(rf"\.\*\\\.\(({_NUMBERS})\)(?:\\\.(.+)\.\*|\(\\\.\.\*\)\?)")
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


def patterns(numbers: str, modules: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the patterns of the modules that train. A module that is not there is one without a match, as there.

    numbers: layers that train, "30|31" or counted from the end as in `surefoot.planning.trained`; empty for none.
    """
    inside = [_ALL] if "all" in modules else [rf"\.{re.escape(module)}.*" for module in modules]
    return [*(rf".*\.({numbers}){one}" for one in inside if numbers), *(f".*{re.escape(module)}.*" for module in extra)]


def _numbers(draft: Draft) -> str:
    """Return the layers that train, as in `patterns`. Raises ValueError with a setting, what is wrong with it, and what
    to do."""
    name, wanted, spread = "freeze_trainable_layers", draft["freeze_trainable_layers"], draft["use_llama_pro"]
    if spread and wanted < 1:
        raise ValueError(name, f"expected a number from 1 with use_llama_pro, got {wanted}", "")
    count = _count(draft.options, draft["model_name_or_path"]) if wanted > 0 else 0
    if count is None:
        return f"last of {wanted} parts" if spread else f"last {wanted}"
    if spread and count % wanted:
        raise ValueError(name, f"use_llama_pro needs a divisor of the model's {count} layers, got {wanted}", "")
    return "|".join(map(str, _layers(wanted, spread, count)))


def _layers(wanted: int, spread: bool, count: int) -> Sequence[int]:
    """Return the first layers for a negative number, else the last of `count`, or the last of each of as many parts."""
    if wanted <= 0:
        return range(-wanted)
    return range(count // wanted - 1, count, count // wanted) if spread else range(max(0, count - wanted), count)


def _count(options: Options, model: str) -> int | None:
    """Return the number of layers in the model's config.json, None if it cannot be read."""
    try:
        config = json.loads(options.read(f"{model}/config.json"))
        config = config.get("text_config", config)
        return next(int(config[key]) for key in _LAYERS if config.get(key))
    except (InputError, ValueError, TypeError, AttributeError, StopIteration):
        return None


def _read(ours: Ours) -> dict[str, Any]:
    """Return the settings that say model.trained; empty if none do."""
    trained = ours["model.trained"] or []
    inside = [found for one in trained if (found := _OF_LAYERS.fullmatch(one))]
    numbers = inside[0][1] if inside else ""
    modules = [_plain(found[2]) if found[2] else "all" for found in inside]
    extra = [_plain(found[1]) for one in trained if not _OF_LAYERS.fullmatch(one) and (found := _EXTRA.fullmatch(one))]
    if numbers.startswith("last"):
        number, spread = int(re.sub(r"\D", "", numbers)), " of " in numbers
    else:
        layers = [int(number) for number in numbers.split("|") if number]
        number = -len(layers) if layers[:1] == [0] else len(layers)
        spread = number > 1 and layers[1] - layers[0] > 1
        count = _count(ours.options, ours["model.path"]) if number > 0 else 0
        if count is None or (spread and count % number) or list(_layers(number, spread, count)) != layers:
            return {}
    if not trained or patterns(numbers, modules, extra) != trained:
        return {}
    return dict(zip(SETTINGS, (number, ",".join(modules) or None, ",".join(extra) or None, spread), strict=True))


def _plain(escaped: str) -> str:
    return re.sub(r"\\(.)", r"\1", escaped)


def kind(ours: Ours) -> str:
    """finetuning_type"""
    return "lora" if ours["adapter"] else "freeze" if _read(ours) else "full"


def said(name: str) -> Back:
    """The value of one of `SETTINGS`."""
    return lambda ours: _read(ours).get(name)
