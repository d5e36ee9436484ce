"""Table of the layouts that are recognized, and the rules from transformers' layout to those that can be written.

docs/convert.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.models.convert.recognize import Target, groups
from surefoot.models.convert.recognize_adapter import regrouped_config, regrouping
from surefoot.models.convert.rules import Rule, apply
from surefoot.models.convert.tensors import LazyTensor, Tensors, layout_error


@dataclass(frozen=True)
class Layout:
    """A layout of weights.

    name: in messages and `surefoot convert --to NAME`.
    recognized_by: the names or shapes that it is recognized by.
    rules: kinds in `surefoot.models.convert.rules` that convert from it.
    to: whether `surefoot convert --to NAME` writes it.
    """

    name: str
    recognized_by: str
    rules: tuple[str, ...] = ()
    to: bool = False


LAYOUTS: tuple[Layout, ...] = (
    Layout("hf", "the names and shapes that transformers uses for config.json", to=True),
    Layout(
        "wrapped",
        "`module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `base_model.model.` or "
        "another prefix of every name; those with `_` also inside names",
        ("unwrap",),
    ),
    Layout("backbone", "names without the model's own prefix (`model.`, `transformer.`, `model.decoder.`)", ("wrap",)),
    Layout("base-layer", "`.base_layer.` in names: the base of an adapter", ("unwrap",)),
    Layout(
        "fused",
        "one matrix `qkv_proj`, `qkv`, `Wqkv`, `c_attn`, `in_proj` or `gate_up_proj`, `gate_up`, or an adapter on one, "
        "where the family has the parts",
        ("split", "split adapter"),
        to=True,
    ),
    Layout(
        "split",
        "`q_proj`, `k_proj`, `v_proj` or `gate_proj`, `up_proj`, or adapters on them, where the family has one matrix",
        ("fuse", "fuse adapter"),
        to=True,
    ),
    Layout("transposed", "weights of linear layers transposed against the family's layout", ("transpose",), to=True),
    Layout("tied-head", "an output head that is equal to its tied embedding", ("drop tied head",), to=True),
    Layout(
        "buffers",
        "`rotary_emb.inv_freq`, `attn.masked_bias` and the mask `attn.bias` of [1, 1, n, n] from older versions",
        ("drop buffers",),
    ),
    Layout("deepspeed-chat", "a reward model: `rwtransformer.`, `v_head.weight`", ("unwrap", "add value bias"), True),
    Layout("value-head", "`v_head.summary.weight` and `v_head.summary.bias` in addition to a model"),
    Layout("zero", "a ZeRO checkpoint, stage 1, 2 or 3: `*_optim_states.pt` and `*_model_states.pt`"),
    Layout("peft", "`base_model.model.`, `lora_A.weight`, `lora_magnitude_vector`: as saved by PEFT", to=True),
    Layout("live-peft", "`lora_A.default.weight`: the names in a loaded model", ("unname adapter",), to=True),
    Layout(
        "old-dora",
        "`weight_m_wdecomp.weight` of [outputs, 1]: saved by the original DoRA code",
        ("new magnitude",),
        to=True,
    ),
)
TARGETS = tuple(layout.name for layout in LAYOUTS if layout.to)


MODEL_TARGETS = ("hf", "fused", "split", "transposed", "tied-head", "deepspeed-chat")
ADAPTER_TARGETS = ("peft", "live-peft", "old-dora", "fused", "split")


def rules_to(layout: str, tensors: Tensors, target: Target, value_head: bool) -> list[Rule]:
    """Return the rules that convert a model from hf to `layout`.

    tensors: weights in the layout hf.
    value_head: whether it is a reward model.

    Raises InputError if the layout does not exist for this model.
    """
    there = target.head in tensors
    tied = {"head": target.head, "embedding": target.embedding}
    drop = [Rule("drop tied head", tied)] if target.facts.tied and there else []
    if layout == "hf":
        return drop
    if layout == "tied-head":
        if not target.facts.tied:
            raise layout_error("--to tied-head", "config.json does not tie the head to the embedding")
        return [] if there else [Rule("copy tied head", tied)]
    if layout == "deepspeed-chat":
        if not value_head:
            raise layout_error("--to deepspeed-chat", "the model has no value head", "convert a reward model")
        if not target.facts.tied:
            what = "a DeepSpeed-Chat reward model has no output head, and this one's is not tied to the embedding"
            raise layout_error("--to deepspeed-chat", what)
        front = {"piece": target.facts.embedding.partition(".")[0], "at": [""], "but": ["v_head."]}
        outer = {"piece": "rwtransformer", "at": [""], "but": ["v_head."]}
        return [*drop, Rule("drop value bias", {}), Rule("unwrap", front), Rule("wrap", outer)]
    if not target.linears:
        raise layout_error(f"--to {layout}", f"no family row describes {target.facts.model_type}'s layers")
    if layout == "transposed":
        modules = [linear.path for linear in target.linears]
        return [*drop, Rule("transpose", {"layers": target.layers, "modules": modules})]
    rules = []
    for group in groups(target):
        settings = {"layers": target.layers, "sizes": list(group.sizes), "dim": int(target.transposed)}
        settings |= {"fused": group.fused[0], "parts": list(group.parts[0])}
        if group.own_is_fused != (layout == "fused"):
            rules.append(Rule("fuse" if layout == "fused" else "split", settings))
    if not rules:
        what = f"{target.facts.model_type} has no matrices to store {layout}, or its own layout stores them so already"
        raise layout_error(f"--to {layout}", what)
    return [*drop, *rules]


def adapter_rules_to(
    layout: str, tensors: Tensors, config: Mapping[str, Any], target: Target | None, where: str
) -> tuple[list[Rule], dict[str, LazyTensor], dict[str, Any]]:
    """Convert an adapter from peft to `layout`. Returns the rules, and the tensors and adapter_config.json after them.

    tensors, config: of the adapter in the layout peft.
    target: the base model; required for fused and split.
    where: the place that errors name.

    Raises InputError if the layout does not exist for this adapter.
    """
    after, settings = dict(tensors), dict(config)
    if layout == "peft":
        return [], after, settings
    if layout in ("live-peft", "old-dora"):
        rule = Rule("name adapter", {"name": "default"}) if layout == "live-peft" else Rule("old magnitude", {})
        return [rule], apply(rule, after), settings
    if target is None:
        what = "needs the sizes of the base model's matrices"
        raise layout_error(f"--to {layout}", what, "give its folder: --base FOLDER")
    rules = []
    for group in groups(target):
        rule = regrouping(after, group, fuse=layout == "fused")
        if rule is not None:
            settings = regrouped_config(settings, rule, where)
            after = apply(rule, after)
            rules.append(rule)
    if not rules:
        kind = "separate" if layout == "fused" else "fused"
        what = f"nothing to convert: the adapter is on no {kind} q, k, v or gate, up of {target.facts.model_type}"
        raise layout_error(f"--to {layout}", what)
    return rules, after, settings
