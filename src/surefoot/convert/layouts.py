"""The layouts that are recognised, in one table: how each is told, and what becomes of it. docs/convert.md shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """told_by: what the names or shapes show. rules: kinds of `surefoot.convert.rules` that lead away from it.

    to: whether `surefoot convert --to NAME` writes it.
    """

    name: str
    told_by: str
    rules: tuple[str, ...] = ()
    to: bool = False


LAYOUTS: tuple[Layout, ...] = (
    Layout("hf", "the names and shapes that transformers gives config.json", to=True),
    Layout(
        "wrapped",
        "`module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `base_model.model.` or "
        "another common prefix in front; those that begin with `_` also within names",
        ("unwrap",),
    ),
    Layout("backbone", "names without the model's own prefix (`model.`, `transformer.`, `model.decoder.`)", ("wrap",)),
    Layout("base-layer", "`.base_layer.` in names, from a base under an adapter", ("unwrap",)),
    Layout(
        "fused",
        "one matrix `qkv_proj`, `qkv`, `Wqkv`, `c_attn`, `in_proj` or `gate_up_proj`, `gate_up` where the family has "
        "its parts",
        ("split",),
        to=True,
    ),
    Layout(
        "split",
        "`q_proj`, `k_proj`, `v_proj` or `gate_proj`, `up_proj` where the family has one matrix",
        ("fuse",),
        to=True,
    ),
    Layout("transposed", "weights of linear layers turned, against the family", ("transpose",), to=True),
    Layout(
        "tied-head", "an output head equal to the embedding, where config.json ties them", ("drop tied head",), to=True
    ),
    Layout("buffers", "`rotary_emb.inv_freq`, `attn.bias`, `attn.masked_bias` from older versions", ("drop buffers",)),
    Layout(
        "deepspeed-chat", "`rwtransformer.` and `v_head.weight`: a reward model", ("unwrap", "add value bias"), to=True
    ),
    Layout("value-head", "`v_head.summary.weight` and `v_head.summary.bias` beside a model", ()),
    Layout("zero", "ZeRO stage 1, 2 or 3: `*_optim_states.pt` and `*_model_states.pt`", ()),
    Layout(
        "peft", "`base_model.model.`, `lora_A.weight`, `lora_magnitude_vector`: an adapter as PEFT saves it", to=True
    ),
    Layout(
        "live-peft", "`lora_A.default.weight`: an adapter as a running model holds it", ("unname adapter",), to=True
    ),
    Layout("old-dora", "`weight_m_wdecomp.weight` of [outputs, 1]: DoRA's first code", ("new magnitude",), to=True),
    Layout(
        "fused-adapter",
        "an adapter on `qkv_proj` or `gate_up_proj` where the base has its parts",
        ("split adapter",),
        to=True,
    ),
    Layout("split-adapter", "an adapter on the parts where the base has one matrix", ("fuse adapter",), to=True),
)
