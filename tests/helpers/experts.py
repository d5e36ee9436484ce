"""Tiny mixtures of experts of real families, and the reference computation of one of their layers."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from surefoot.families.model_facts import ModelFacts
from surefoot.models.facts import facts_of

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
_DENSE_FIRST = {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 12}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": [0]},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "mixtral": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm4_moe": _DENSE_FIRST | {"head_dim": 8},
    "deepseek_v2": _DENSE_FIRST | _LATENT,
    "deepseek_v3": _DENSE_FIRST | _LATENT,
    "olmoe": {"num_experts": 6},
    "granitemoe": {"num_local_experts": 6},
    "qwen3_next": {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "head_dim": 8}
    | _DELTA,
}


def moe_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of the family `name`."""
    return {"model_type": name, **_SIZES, **MOE[name], **changes}


def moe_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Build a model with random weights from a fixed seed, also in routers, which some families start at zero."""
    fields = moe_config(name, **changes)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.15)
    return model.eval()


def expert_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the experts' matrices."""
    return tuple(name for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name)


def dense_experts(
    layer: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, pairs: Any
) -> torch.Tensor:
    """Compute the output of experts, [T, H], with a loop over plain linear layers and their adapters.

    layer: transformers' module of the experts.
    x: [T, H].
    index, weights: [T, k], the experts of each token and their routing weights.
    pairs: parameter -> (A, B, scale) of each expert.
    """
    out = torch.zeros_like(x)
    for number in range(layer.num_experts):
        tokens, place = (index == number).nonzero(as_tuple=True)
        up = _one_expert(layer, "gate_up_proj", number, x[tokens], pairs)
        down = _one_expert(layer, "down_proj", number, layer._apply_gate(up), pairs)
        out = out.index_add(0, tokens, down * weights[tokens, place, None])
    return out


def _one_expert(layer: nn.Module, name: str, number: int, x: torch.Tensor, pairs: Any) -> torch.Tensor:
    matrix = getattr(layer, name)[number]
    linear = nn.Linear(0, 0, dtype=x.dtype)
    linear.weight = nn.Parameter((matrix.T if layer.is_transposed else matrix).to(x.dtype))
    linear.bias = nn.Parameter(getattr(layer, f"{name}_bias")[number].to(x.dtype)) if layer.has_bias else None
    a, b, scale = pairs[name][number]
    return linear(x) + scale * nn.functional.linear(nn.functional.linear(x, a), b)


def moe_facts(folder: Path, name: str, **changes: Any) -> ModelFacts:
    """Return the facts that planning reads from a config.json in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(moe_config(name, **changes)), encoding="utf-8")
    return facts_of(folder)
