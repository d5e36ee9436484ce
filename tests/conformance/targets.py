"""Which modules an adapter must stand on, per family: written by hand from the models' published code, and for the many
families of `helpers.zoo_modern` by one rule that looks at the model as transformers builds it."""

from pathlib import Path

from torch import nn

from conformance.reference import of_text, opened

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

_ROUTERS = (".gate", ".gate.wg", ".router", ".shared_expert_gate")
_NAMED_AS_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
# PEFT refuses an adapter on Mamba's out_proj. Of the first Mamba a fused kernel takes two more weights past their
# layers, and no forward pass calls dt_proj.
_FIRST = (".out_proj", ".x_proj", ".dt_proj")
_PAST = {
    "mamba": _FIRST,
    "falcon_mamba": _FIRST,
    **dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h"), (".out_proj",)),
    "jamba": (".dt_proj",),
}


def targets_of(family: str, base: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Linear layers, and experts' parameters, that an adapter on everything stands on. base: the family's model."""
    if family in TARGETS:
        return TARGETS[family], frozenset()
    model = opened(base)
    barred = (*_ROUTERS, ".correction_coefs", *_PAST.get(family, ()))  # the second of Gemma 3n
    linears = frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not model.get_output_embeddings()
        and of_text(name)
        and not name.endswith(barred)
    )
    experts = {name for name, parameter in model.named_parameters() if parameter.dim() == 3 and ".experts." in name}
    # PEFT takes these names for the experts' own wherever they stand; as parameters it finds them.
    dense = {name for name in linears if experts and name.endswith(_NAMED_AS_EXPERTS)}
    return linears - dense, frozenset(experts | {f"{name}.weight" for name in dense})
