"""Which weights train: Axolotl's adapter, unfrozen_parameters, and tower and projector of a model that sees.

`unfrozen_parameters` are patterns of parameters, which match from the start of a name; surefoot's `model.trained` are
patterns of whole module names. Facts: `_build_peft_lora_config`, `find_all_linear_names` and utils/freeze.py of Axolotl
0.19.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from surefoot.config.sections import PATTERN
from surefoot.families.vision_parts import PARTS, part_of
from surefoot.interop.adapters import (
    EIGHT_BITS,
    module_names,
    set_default_targets,
    set_initial,
    set_start,
    targets_or_pattern,
)
from surefoot.interop.backward import Ours
from surefoot.interop.draft import Draft
from surefoot.interop.shared_rules import switch

_NO_LAYER = ("lm_head", "embed_tokens", "embed_out", "wte")


def set_adapter(draft: Draft) -> None:
    kind = draft["adapter"] or ""
    shape = ("lora_r", "lora_alpha", "lora_dropout", "lora_modules_to_save", "peft_use_dora", "peft_use_rslora",
             "peft_init_lora_weights")  # fmt: skip
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
    set_start(draft, "peft_init_lora_weights")
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


def set_vision(draft: Draft) -> None:
    """Set vision.*: with a processor, all weights include tower and projector, and an adapter what PEFT finds there."""
    named, base = draft["processor_type"], str(draft["base_model"]).lower()
    unfrozen = _set_unfrozen(draft, sees=named is not None)
    if named is None:
        draft.drop("there is no processor", "freeze_mm_modules")
        return
    family = next((family for family in TOWERS if re.search(family, base)), None)
    if family is None:
        what = f"surefoot knows no family that sees, or not its tower, by the name {draft['base_model']}"
        draft.refuse("processor_type", what, "use one of the families in docs/images.md, under its published name")
        return
    draft.note("processor_type", "carried", "pictures are read by the model's own processor")
    by = "lora_target_linear" if draft["lora_target_linear"] else "lora_target_modules"
    modules = [name for name in _every(TOWERS[family]) if not (draft["freeze_mm_modules"] and _freezes(name))]
    targets = draft.written("adapter.targets") or []
    linear = {name for name in modules if is_linear(name, family)}
    reached = _reached(targets, modules, linear, by_ending=draft["lora_target_linear"])
    if other := next((name for name in reached if name not in linear or not _has(name, targets)), None):
        fix = "set freeze_mm_modules: true, or name the language model: 'model.language_model.layers.*.q_proj'"
        draft.refuse(by, f"Axolotl would adapt {other} as well, which surefoot does not", fix)
    for part in PARTS:
        if any(_part(name) == part for name in reached):
            draft.set(f"vision.{part}", "adapter", by, why=_IN_16_BITS if draft["load_in_4bit"] else "")
        else:
            trained = any(_part(name) == part for name in modules) and not (draft["adapter"] or unfrozen)
            draft.set(f"vision.{part}", "trained" if trained else "frozen", "freeze_mm_modules")
    if draft["adapter"]:
        draft.note("freeze_mm_modules", "carried", "without an adapter in them both are frozen", "vision")


def _named(inside: str, names: str, outside: str = "") -> tuple[str, ...]:
    """Return module names: those in a group of the model, and others. Layers are numbered 0."""
    return (*(f"{inside}.{name}" for name in names.split()), *outside.split())


_OLDER = "blocks.0.attn.qkv blocks.0.attn.proj patch_embed.proj merger.mlp.0 merger.mlp.2"
_NEWER = (
    "blocks.0.attn.qkv blocks.0.attn.proj patch_embed.proj blocks.0.mlp.linear_fc1 blocks.0.mlp.linear_fc2 "
    "merger.linear_fc1 merger.linear_fc2 pos_embed"
)
_SIGLIP = "embeddings.patch_embedding embeddings.position_embedding " + " ".join(
    f"encoder.layers.0.{name}"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
)
_PIXTRAL = "patch_conv " + " ".join(
    f"transformer.layers.0.{name}_proj"
    for name in ("attention.q", "attention.k", "attention.v", "attention.o",
                 "feed_forward.gate", "feed_forward.up", "feed_forward.down")
)  # fmt: skip
_JOINED = "multi_modal_projector.linear_1 multi_modal_projector.linear_2"
_GEMMA4 = "patch_embedder.input_proj " + " ".join(
    f"encoder.layers.0.{name}_proj.linear"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
)
_GLM = "patch_embed.proj blocks.0.attn.qkv blocks.0.attn.proj downsample merger.proj embeddings.position_embedding " + (
    " ".join(f"{part}.{name}_proj" for part in ("blocks.0.mlp", "merger") for name in ("gate", "up", "down"))
)
_INTERNVL = "embeddings.patch_embeddings.projection " + " ".join(
    f"encoder.layer.0.{name}"
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.projection_layer",
                 "mlp.fc1", "mlp.fc2")
)  # fmt: skip
_MLLAMA = (
    "patch_embedding gated_positional_embedding.tile_embedding "
    "pre_tile_positional_embedding.embedding post_tile_positional_embedding.embedding "
) + " ".join(
    f"{part}transformer.layers.0.{name}"
    for part in ("", "global_")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2")
)
# Its blocks stand in stages: both numbers are 0 here.
_MOBILENET = "conv_stem.conv msfa.ffn.pw_exp.conv msfa.ffn.pw_proj.conv " + " ".join(
    f"blocks.0.0.{name}"
    for name in ("conv_exp", "conv_pwl", "dw_mid.conv", "dw_start.conv", "pw_exp.conv", "pw_proj.conv",
                 "attn.key.down_conv", "attn.value.down_conv",
                 "attn.query.proj", "attn.key.proj", "attn.value.proj", "attn.output.proj")
)  # fmt: skip
_LLAMA4 = "patch_embedding.linear vision_adapter.mlp.fc1 vision_adapter.mlp.fc2 " + " ".join(
    f"model.layers.0.{name}"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2")
)
_LFM2 = r"lfm2(\.5)?-vl"  # whose patches are linear layers
# Pattern of the names of a family's models -> modules of its tower and projector of the kinds that PEFT can adapt.
TOWERS: Mapping[str, tuple[str, ...]] = {
    "qwen2-vl": _named("visual", f"{_OLDER} blocks.0.mlp.fc1 blocks.0.mlp.fc2"),
    r"qwen2\.5-vl": _named("visual", f"{_OLDER} blocks.0.mlp.gate_proj blocks.0.mlp.up_proj blocks.0.mlp.down_proj"),
    "qwen3-vl": _named("visual", f"{_NEWER} deepstack_merger_list.0.linear_fc1 deepstack_merger_list.0.linear_fc2"),
    r"qwen3\.5": _named("visual", _NEWER),
    "gemma-3-": _named("vision_tower", f"{_SIGLIP} head.attention.out_proj head.mlp.fc1 head.mlp.fc2"),
    "gemma-3n-": _named(
        "vision_tower.timm_model", _MOBILENET, "embed_vision.embedding embed_vision.embedding_projection"
    ),
    "gemma-4-12b": _named("embed_vision", "patch_dense multimodal_embedder.embedding_projection"),
    "gemma-4-(?!12b)": _named("vision_tower", _GEMMA4, "embed_vision.embedding_projection"),
    r"llava-v?1\.5": _named("vision_tower", _SIGLIP, _JOINED),
    r"internvl3(_5)?-.*-hf": _named("vision_tower", _INTERNVL, _JOINED),
    r"glm-4\.[156]v": _named("visual", _GLM),
    _LFM2: _named("vision_tower", _SIGLIP, _JOINED),
    "paddleocr-vl": _named("visual.vision_model", _SIGLIP, "projector.linear_1 projector.linear_2"),
    r"llama-3\.2-\d+b-vision": _named("vision_model", _MLLAMA, "multi_modal_projector"),
    "llama-4-": _named("vision_model", _LLAMA4, "multi_modal_projector.linear_1"),
    "smolvlm": _named("vision_model", _SIGLIP, "connector.modality_projection.proj"),
    "pixtral": _named("vision_tower", _PIXTRAL, _JOINED),
    r"mistral-small-(3\.[12]|4)|magistral-small-2509|ministral-3-|mistral-medium-3\.5": _named(
        "vision_tower", _PIXTRAL, f"{_JOINED} multi_modal_projector.patch_merger.merging_layer"
    ),
}


_NOT_LINEAR = re.compile(
    r"(patch_embed\.proj|embeddings?\.projection|pos_embed|embedding|patch_conv|downsample|timm_model\..*)$"
)
_LAYERS = 64  # more than any of these towers has
_IN_16_BITS = "the tower's own weights stay in 16 bits here"


# Axolotl's freeze_mm_modules looks for these in a name, and misses two projectors: `projector` and `connector`.
_FREEZES = ("vision_tower", "vision_model", "embed_vision", "multi_modal_projector", "visual")


def _every(modules: Sequence[str]) -> list[str]:
    """Return full names, of every layer that there may be."""
    names = [f"model.{name}" for name in modules]
    return list(dict.fromkeys(name.replace(".0.", f".{at}.", 1) for at in range(_LAYERS) for name in names))


def is_linear(name: str, family: str) -> bool:
    """Whether a module of a tower or projector is a linear layer. family: a key of `TOWERS`."""
    return not _NOT_LINEAR.search(name) or (family == _LFM2 and name.endswith("patch_embedding"))


def _freezes(name: str) -> bool:
    return any(part in _FREEZES for part in name.split("."))


def _part(name: str) -> str | None:
    return part_of(f"{name}.weight")


def _reached(
    targets: str | Sequence[str], modules: Sequence[str], linear: Collection[str], *, by_ending: bool
) -> list[str]:
    """Return the modules that PEFT adapts.

    linear: those of `modules` that are linear layers.
    by_ending: whether the targets are Axolotl's own list of all linear layers, of which it knows the last part of the
        name alone.
    """
    if targets == "all-linear":
        endings = {name.rpartition(".")[2] for name in linear} if by_ending else set()
        return [name for name in modules if name in linear or name.rpartition(".")[2] in endings]
    # Axolotl looks into Gemma 4's clipped layers, which PEFT does not know.
    both = {name: {name, name.removesuffix(".linear")} for name in modules}
    return [name for name in modules if any(_adapts(target, one) for target in targets for one in both[name])]


def _has(name: str, targets: str | Sequence[str]) -> bool:
    """Whether surefoot's adapter reaches a linear layer that PEFT's does."""
    return targets == "all-linear" or any(_adapts(target, name) for target in targets)


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
_ESCAPED = re.compile(r"\.(?!\+)")
_OWN = re.compile(r"(\.weight|\.bias)?\$?$")  # a parameter's own name, and the end


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
    if not other and heads and bodies and not (sees and not all(body[1] for body in bodies)):
        draft.note("unfrozen_parameters", "carried", "tower and projector stay frozen", "vision")
    elif sees or any("[" in pattern and pattern.endswith("]") and ":" in pattern for pattern in patterns):
        what = f"surefoot trains whole modules of a language model, not {', '.join(patterns)}"
        draft.refuse("unfrozen_parameters", what, _PARTS)
    else:
        named = [one for one in patterns if not _NOTHING.fullmatch(one)] or patterns
        draft.set("model.trained", [_modules(one) for one in named], "unfrozen_parameters", why=_WHOLE_MODULES)
    return True


_WHOLE_MODULES = "modules instead of parameters, so that a bias trains with its weight"


def _modules(pattern: str) -> str:
    """Return the pattern of the modules whose parameters begin with a pattern of Axolotl's."""
    end = _OWN.search(pattern)
    assert end is not None  # it may be empty
    whole = bool(end[0])
    escaped = _ESCAPED.sub(r"\\.", pattern[: end.start()] if whole else pattern).removeprefix("^")
    return escaped if whole else f"{escaped}.*"


def unfrozen(ours: Ours) -> list[str] | None:
    """unfrozen_parameters, if each pattern of model.trained is one that a pattern of Axolotl's becomes."""
    trained = ours["model.trained"] or []
    begins = [one.removesuffix(".*") if one.endswith(".*") else f"{one}.weight$" for one in trained]
    plain = [one.replace(r"\.", ".") for one in begins]
    return plain if plain and [_modules(one) for one in plain] == trained else None
