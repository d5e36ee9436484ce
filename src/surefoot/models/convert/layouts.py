"""The layouts that are recognised, in one table: how each is told, and what becomes of it. docs/convert.md shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """told_by: what the names or shapes show. rules: kinds of `surefoot.models.convert.rules` that lead away from it.

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
        "another prefix before every name; those that begin with `_` within names, too",
        ("unwrap",),
    ),
    Layout("backbone", "names without the model's own prefix (`model.`, `transformer.`, `model.decoder.`)", ("wrap",)),
    Layout("base-layer", "`.base_layer.` in names: a base from under an adapter", ("unwrap",)),
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
    Layout("transposed", "weights of linear layers turned, against the family", ("transpose",), to=True),
    Layout("tied-head", "an output head that repeats the embedding it is tied to", ("drop tied head",), to=True),
    Layout(
        "buffers",
        "`rotary_emb.inv_freq`, `attn.masked_bias` and the mask `attn.bias` of [1, 1, n, n] from older versions",
        ("drop buffers",),
    ),
    Layout("deepspeed-chat", "a reward model: `rwtransformer.`, `v_head.weight`", ("unwrap", "add value bias"), True),
    Layout("value-head", "`v_head.summary.weight` and `v_head.summary.bias` beside a model"),
    Layout("zero", "a ZeRO checkpoint, stage 1, 2 or 3: `*_optim_states.pt` and `*_model_states.pt`"),
    Layout("peft", "`base_model.model.`, `lora_A.weight`, `lora_magnitude_vector`: as PEFT saves it", to=True),
    Layout("live-peft", "`lora_A.default.weight`: as a running model has it", ("unname adapter",), to=True),
    Layout("old-dora", "`weight_m_wdecomp.weight` of [outputs, 1]: DoRA's first code", ("new magnitude",), to=True),
)
TARGETS = tuple(layout.name for layout in LAYOUTS if layout.to)
