"""Adapters and quantized bases of other tools: module names, first values, rates of parts (LoRA+), saved adapters.

    module_names("q_proj v_proj")                                 # ["q_proj", "v_proj"]

PEFT reads a string of target modules as a regular expression; surefoot's targets are names, so a pattern is refused.
PEFT's from_pretrained takes kind, rank, scale, dropout and modules from the adapter's own adapter_config.json, whatever
the tool's settings for a new adapter say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from surefoot.config.saved_shape import saved_shape
from surefoot.config.schema import OptimConfig
from surefoot.config.sections import PATTERN
from surefoot.interop.backward import Ours
from surefoot.interop.draft import Draft
from surefoot.system.errors import InputError

EIGHT_BITS = "8-bit weights as in bitsandbytes; activations are not rounded (LLM.int8() rounds them on a GPU)"

_STARTS = re.compile(r"(pissa)(?:_niter_([1-9][0-9]*))?|(olora)")
STARTED = "the run folder holds a LoRA of twice the rank for the unchanged base"


def set_start(draft: Draft, name: str) -> None:
    """Set adapter.start from PEFT's init_lora_weights."""
    word = draft[name]
    if word in (True, None, "true", "True"):
        draft.note(name, "carried")
        return
    found = _STARTS.fullmatch(str(word))
    if found is None:
        draft.refuse(name, f"surefoot's adapters do not start with {word}", "use true, pissa, pissa_niter_16 or olora")
        return
    draft.set("adapter.start", found[1] or found[3], name, why=STARTED)
    if found[2]:
        draft.set("adapter.start_iterations", int(found[2]), name, why=STARTED)


def set_quantized(draft: Draft, method: str, bits: str, double: str, *, adapted: bool, fix: str) -> None:
    """Set precision.base for bitsandbytes' 8 bits, and 4 bits in NF4.

    method, bits, double: the tool's settings. adapted: whether an adapter trains. fix: the setting for an adapter.
    """
    count = draft[bits]
    if draft[method] is None and count is None:
        draft.drop("nothing is quantized", double)
    elif str(draft[method]).lower() not in ("bnb", "bitsandbytes") or count not in (4, 8):
        name = bits if str(draft[method]).lower() in ("bnb", "bitsandbytes") else method
        draft.refuse(name, "surefoot quantizes to 4 and 8 bits as bitsandbytes does", f"{method}: bnb, {bits}: 4")
    elif not adapted:
        draft.refuse(bits, f"{count}-bit weights cannot train", f"use {fix}")
    elif count == 8:
        draft.set("precision.base", "int8", bits, method, why=EIGHT_BITS)
        draft.drop("applies to 4 bits", double)
    else:
        set_nf4(draft, double, bits, method)


def set_nf4(draft: Draft, double: str, *names: str) -> None:
    """Set precision.base to NF4, whose constants are quantized again here. double: the tool's setting for that."""
    draft.set("precision.base", "nf4", *names, double, why="" if draft[double] else "here with double quantization")


_NAME = re.compile(r"[\w.-]+")
_LIST = re.compile(r"\[(.*)\]|\((.*)\)", re.DOTALL)
_EXPECTED = "module names such as [q_proj, v_proj], not a pattern"
_BECAUSE = "PEFT's default for Llama, Mistral and Qwen2; name them for families with other module names"


def module_names(value: Any) -> list[str] | None:
    """Read module names separated by blanks or commas, a list, or a list literal (quoted or not); None for none.

    Raises ValueError, which says what was expected, for a pattern.
    """
    if value is None or value in ("None", ""):
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool | int | float | dict) for item in items):
        raise ValueError(_EXPECTED)
    text = " ".join(str(item) for item in items).strip()
    written = _LIST.fullmatch(text)
    inner = text if written is None else next(group for group in written.groups() if group is not None)
    names = [name.strip("'\"") for name in re.split(r"[\s,]+", inner) if name.strip("'\"")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(_EXPECTED)
    return names or None


def targets_or_pattern(value: Any) -> list[str]:
    """Read module names, or a string that PEFT would take as a pattern of whole names; [] for none."""
    try:
        return module_names(value) or []
    except ValueError:
        if not isinstance(value, str):
            raise
        return [f"{PATTERN}{value}"]


def set_default_targets(draft: Draft, name: str) -> None:
    """Set PEFT's default targets if the setting `name` names none: surefoot's own default is all linear layers."""
    draft.drop("PEFT's default for the family", name)
    draft.set("adapter.targets", ["q_proj", "v_proj"], *([] if draft.given(name) else [name]), why=_BECAUSE)


LORA_B = "lora_B|lora_magnitude"  # the tools treat every vector as B; an adapter's are DoRA's magnitudes


def rate_of(draft: Draft) -> float:
    """Return the rate of all other weights. Runs after optim.lr is set."""
    return draft.written("optim.lr") or OptimConfig().lr


def set_loraplus(ratio: str, *beside: str) -> Any:
    """Return a rule for LoRA+. ratio: the setting with B's rate as a multiple of A's. beside: settings of embeddings
    with LoRA, which surefoot does not have."""

    def rule(draft: Draft) -> None:
        draft.drop("is for LoRA on embeddings", *beside)
        if draft[ratio] and not draft.written("adapter.kind"):
            draft.refuse(ratio, "is for LoRA", "leave it out")
        elif draft[ratio]:
            vectors = "vectors of modules that train in full have it too there"
            why = vectors if draft.written("adapter.modules_to_save") else ""
            draft.set("optim.rates", [{"of": LORA_B, "lr": rounded(rate_of(draft) * draft[ratio])}], ratio, why=why)

    return rule


def ratio_back(ours: Ours) -> float | None:
    """Return LoRA+'s ratio of a surefoot config; None without."""
    rates = ours["optim.rates"]
    return rounded(rates[0]["lr"] / ours["optim.lr"]) if [one["of"] for one in rates] == [LORA_B] else None


def rounded(number: float) -> float:
    """Return a computed number without its last bits, which would fill a config."""
    return float(f"{number:.12g}")


MERGE = "merge it first (surefoot export --merge), or leave it out for a new adapter"


def set_initial(draft: Draft, name: str, shape: Sequence[str], *, dropout: bool) -> None:
    """Set `adapter` to the saved adapter that a setting names, or refuse it.

    name: the setting; its value is a folder.
    shape: settings for a new adapter.
    dropout: whether the tool has the adapter's dropout on in this stage.
    """
    folder = draft[name].rstrip("/")
    if draft.written("stage") == "reward":
        draft.refuse(name, "the value head of a saved adapter is not read", MERGE)
        return
    try:
        saved = json.loads(draft.options.read(f"{folder}/adapter_config.json"))
        targets = module_names(saved["target_modules"])
        if not targets:
            raise ValueError("it names no target_modules")
        found = saved_shape({**saved, "target_modules": "all-linear" if targets == ["all-linear"] else targets})
        found["dropout"] = float(saved.get("lora_dropout") or 0) if dropout else 0.0
    except InputError:
        what = "its adapter_config.json, which decides rank, alpha and modules, cannot be read here"
        draft.refuse(name, what, f"give a folder on this machine; else {MERGE}")
        return
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        draft.refuse(name, f"its adapter_config.json is not one that surefoot reads: {error}", MERGE)
        return
    found = {key: value for key, value in found.items() if value}  # the others are surefoot's defaults
    for key, value in {"initial": folder, **found}.items():
        draft.set(f"adapter.{key}", value, name)
    draft.drop(f"{name} is given, and the saved adapter decides", *shape)
