"""Which weights train: Axolotl's adapter, unfrozen_parameters, and tower and projector of a model that sees.

Facts: `_build_peft_lora_config`, `find_all_linear_names` and utils/freeze.py of Axolotl 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from surefoot.config.sections import PATTERN
from surefoot.interop.draft import Draft
from surefoot.interop.saved_adapter import set_initial
from surefoot.interop.shared_rules import EIGHT_BITS, module_names, set_default_targets, switch, targets_or_pattern

_NO_LAYER = ("lm_head", "embed_tokens", "embed_out", "wte")


def set_adapter(draft: Draft) -> None:
    kind = draft["adapter"] or ""
    shape = ("lora_r", "lora_alpha", "lora_dropout", "lora_modules_to_save", "peft_use_dora", "peft_use_rslora")
    targets = ("lora_target_modules", "lora_target_linear", "lora_target_parameters")
    if kind not in ("", "lora", "qlora"):
        draft.refuse("adapter", f"surefoot does not support the adapter {kind}", "use lora or qlora")
        return
    if (kind == "qlora") != draft["load_in_4bit"]:
        fix = "adapter: qlora and load_in_4bit: true belong together"
        draft.refuse("adapter" if kind else "load_in_4bit", f"load_in_4bit is {switch(draft['load_in_4bit'])}", fix)
        return
    if draft["load_in_8bit"] and kind != "lora":
        draft.refuse(
            "load_in_8bit", f"8-bit weights with adapter: {kind or 'none'}", "use adapter: lora, or leave it out"
        )
        return
    if draft["load_in_8bit"]:
        draft.set("precision.base", "int8", "load_in_8bit", "load_in_4bit", why=EIGHT_BITS)
    else:
        draft.set("precision.base", "nf4" if kind == "qlora" else "auto", "load_in_4bit", "load_in_8bit")
    if draft["quantize_moe_experts"]:
        about = draft.rows["quantize_moe_experts"].about
        draft.note("quantize_moe_experts", "changed", about, "precision.base")
    if not kind:
        draft.drop("there is no adapter", "adapter", *shape, *targets)
        return
    drops = draft["rl"] in (None, "grpo") and not draft["reward_model"]
    if draft["lora_model_dir"] is not None:
        draft.note("adapter", "carried")
        set_initial(draft, "lora_model_dir", (*shape, *targets), dropout=drops)
        return
    draft.set("adapter.kind", "dora" if draft["peft_use_dora"] else "lora", "adapter", "peft_use_dora")
    for name, key in (("lora_r", "rank"), ("lora_alpha", "alpha")):
        if draft[name] is None:
            draft.refuse(name, "is required with an adapter", "set it")
            return
        draft.set(f"adapter.{key}", draft[name], name)
    if drops:
        draft.set("adapter.dropout", draft["lora_dropout"], "lora_dropout")
    else:
        draft.drop("TRL's trainers for this method disable all dropout, including the adapter's", "lora_dropout")
    draft.set("adapter.rslora", draft["peft_use_rslora"], "peft_use_rslora")
    try:
        saved = module_names(draft["lora_modules_to_save"]) or []
        stacked = module_names(draft["lora_target_parameters"]) or []
        named = targets_or_pattern(draft["lora_target_modules"])
    except ValueError as error:
        draft.refuse("lora_target_modules", f"expected {error}")
        return
    draft.set("adapter.modules_to_save", saved, "lora_modules_to_save")
    if draft["lora_target_linear"] or "all-linear" in named:
        draft.set(
            "adapter.targets", "all-linear", *(["lora_target_linear"] if draft["lora_target_linear"] else targets)
        )
        if other := [name for name in named if name.rpartition(".")[2] in _NO_LAYER]:
            fix = "put it into lora_modules_to_save, or name all modules without lora_target_linear"
            draft.refuse("lora_target_modules", f"{other[0]} has no place beside all linear layers here", fix)
        draft.drop("lora_target_linear has them all", *targets)
    elif named or stacked:
        draft.set("adapter.targets", [*named, *stacked], *targets)
    else:
        set_default_targets(draft, "lora_target_modules")


def set_sight(draft: Draft) -> None:
    """Set vision.*: with a processor, all weights include tower and projector; an adapter leaves them frozen here."""
    named, base = draft["processor_type"], str(draft["base_model"]).lower()
    unfrozen = _set_unfrozen(draft, sees=named is not None)
    if named is None:
        draft.drop("there is no processor", "freeze_mm_modules")
        return
    family = next((family for family in TOWERS if family in base), None)
    if family is None:
        fix = f"use a text model, or one whose name has {' or '.join(TOWERS)}"
        draft.refuse("processor_type", "surefoot trains with pictures for the Qwen families alone", fix)
        return
    draft.note("processor_type", "carried", "pictures are read by the model's own processor")
    targets = draft.written("adapter.targets") or []
    if not draft["freeze_mm_modules"] and (adapted := _in_tower(targets, TOWERS[family])):
        name = "lora_target_linear" if draft["lora_target_linear"] else "lora_target_modules"
        fix = "set freeze_mm_modules: true, or name the language model: 'model.language_model.layers.*.q_proj'"
        draft.refuse(name, f"PEFT would adapt {adapted} as well, and surefoot puts no adapter on a vision tower", fix)
    trained = not (draft["adapter"] or draft["freeze_mm_modules"] or unfrozen)
    for part in ("tower", "projector"):
        draft.set(f"vision.{part}", "trained" if trained else "frozen", "freeze_mm_modules")


_BLOCK = "blocks.0."
_SHARED = (f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj", "patch_embed.proj")
_OLDER = (*_SHARED, "merger.mlp.0", "merger.mlp.2")
_NEWER = (*_SHARED, f"{_BLOCK}mlp.linear_fc1", f"{_BLOCK}mlp.linear_fc2", "merger.linear_fc1", "merger.linear_fc2",
          "pos_embed")  # fmt: skip
# Family, as the names of its models have it -> the modules of its tower and projector that PEFT can adapt.
TOWERS: Mapping[str, tuple[str, ...]] = {
    "qwen2-vl": (*_OLDER, f"{_BLOCK}mlp.fc1", f"{_BLOCK}mlp.fc2"),
    "qwen2.5-vl": (*_OLDER, *(f"{_BLOCK}mlp.{name}_proj" for name in ("gate", "up", "down"))),
    "qwen3-vl": (*_NEWER, "deepstack_merger_list.0.linear_fc1", "deepstack_merger_list.0.linear_fc2"),
    "qwen3.5": _NEWER,
}


def _in_tower(targets: str | Sequence[str], modules: Sequence[str]) -> str | None:
    """Return a module of the tower that PEFT adapts with these targets; None for none."""
    names = [f"model.visual.{module}" for module in modules]
    if targets == "all-linear":
        return names[0]
    for target in targets:
        if "visual" in target:  # some blocks only
            return "model.visual"
        if found := next((name for name in names if _adapts(target, name)), None):
            return found
    return None


def _adapts(target: str, name: str) -> bool:
    if not target.startswith(PATTERN):
        return f".{name}".endswith(f".{target}")
    try:
        return re.fullmatch(target.removeprefix(PATTERN), name) is not None
    except re.error:  # the check of the config says so
        return False


# Axolotl matches from the start of a parameter's name and reads a dot as a dot: `model.*` is "model" and any dots.
_BODY = re.compile(r"\^?model(\.language_model)?(\.\*?)?")
_HEAD = re.compile(r"\^?lm_head(\.\*?|\.weight\$?)?")
_NOTHING = re.compile(r"\^?embed_tokens\b.*")  # the name of no parameter begins like this
_BESIDE = "the adapter alone trains; Axolotl freezes the adapter's weights too, whose names begin with base_model"
_PARTS = "train an adapter, name model.language_model and lm_head, or leave it out"


def _set_unfrozen(draft: Draft, *, sees: bool) -> bool:
    """Note unfrozen_parameters, and return whether they leave tower and projector frozen.

    sees: whether the model is trained with pictures, so that `model` alone would include the tower.
    """
    patterns = draft["unfrozen_parameters"] or []
    if draft["adapter"] or not patterns:
        draft.note("unfrozen_parameters", "changed" if patterns else "listed", _BESIDE if patterns else "not set")
        return False
    bodies = [found for pattern in patterns if (found := _BODY.fullmatch(pattern))]
    heads = [pattern for pattern in patterns if _HEAD.fullmatch(pattern)]
    other = [one for one in patterns if not any(part.fullmatch(one) for part in (_BODY, _HEAD, _NOTHING))]
    if other or not heads or not bodies or (sees and not all(body[1] for body in bodies)):
        what = f"surefoot trains all of the language model with its head, not {', '.join(patterns)}"
        draft.refuse("unfrozen_parameters", what, _PARTS)
    else:
        draft.note("unfrozen_parameters", "carried", "tower and projector stay frozen", "vision")
    return True
