"""Which modules an adapter must stand on, per family: written by hand from the models' published code."""

from __future__ import annotations

_GATED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_LAYERS = {
    "llama2": ("model.layers", 2, _GATED),
    "llama3": ("model.layers", 2, _GATED),
    "mistral": ("model.layers", 2, _GATED),
    "qwen2": ("model.layers", 2, _GATED),
    "qwen3": ("model.layers", 2, _GATED),
    "phi3": ("model.layers", 2, ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    "gemma2": ("model.layers", 2, _GATED),
    "gemma3": ("model.layers", 6, _GATED),
    "opt": (
        "model.decoder.layers",
        2,
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"),
    ),
    "gpt2": ("transformer.h", 2, ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
}
TARGETS: dict[str, frozenset[str]] = {
    family: frozenset(f"{layers}.{number}.{module}" for number in range(count) for module in modules)
    for family, (layers, count, modules) in _LAYERS.items()
}
