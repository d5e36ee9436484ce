"""A tiny model of every other causal language model in transformers that people fine-tune, in addition to the zoo.

Only sizes are shrunk: each is built from its own config class, with all kinds of layers of the real one. All have
Qwen's tokenizer; `helpers.zoo` covers what depends on a family's own tokens.

    base = MODERN["falcon_h1"](tmp_path / "base")
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from helpers import zoo_templates, zoo_tokenizers

_SPREAD = 0.16  # as in the zoo
# Taken where the config class has such a key.
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": _SPREAD,
    # mixtures of experts
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # state spaces, linear attention, convolutions
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "time_step_rank": 4,
    "lru_width": 32,
    "attention_window_size": 16,
    "sliding_window": 16,
}
_FULL_AND = {
    "linear": ["linear_attention", "full_attention"],
    "sliding": ["sliding_attention", "full_attention"],
    "conv": ["conv", "full_attention"],
    "mamba": ["mamba", "attention"],
}

GEMMA3N_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
}
# model_type -> what else it needs to be small and to mix its kinds of layers.
DENSE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"layer_types": _FULL_AND["sliding"]},
    "ernie4_5": {},
    "exaone4": {"layer_types": _FULL_AND["sliding"]},
    "gemma": {},
    "gemma3n_text": GEMMA3N_TEXT,
    "glm": {},
    "glm4": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "embedding_multiplier": 6.0},
    "hunyuan_v1_dense": {},
    "ministral": {"layer_types": _FULL_AND["sliding"]},
    "ministral3": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": _FULL_AND["sliding"]},
    "phi": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "falcon_mamba": {},
    "lfm2": {"layer_types": _FULL_AND["conv"], "block_auto_adjust_ff_dim": False},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "olmo_hybrid": {"layer_types": _FULL_AND["linear"]},
    "qwen3_5_text": {"layer_types": _FULL_AND["linear"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe": {},
    "gpt_oss": {"layer_types": _FULL_AND["sliding"]},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": _FULL_AND["mamba"], "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": _FULL_AND["conv"], "num_dense_layers": 1},
    "llama4_text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_5_moe_text": {"layer_types": _FULL_AND["linear"]},
    "qwen3_next": {"layer_types": _FULL_AND["linear"]},
}


def _model(kind: str, keys: dict[str, Any], folder: Path, **changes: Any) -> Path:
    zoo_tokenizers.qwen(folder, zoo_templates.QWEN25, thinks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config_class = CONFIG_MAPPING[kind]
    known = config_class()
    tokens = {"vocab_size": len(tokenizer) + 5, "eos_token_id": tokenizer.eos_token_id}
    sizes = {key: value for key, value in _SIZES.items() if hasattr(known, key)}
    config = config_class(**sizes | {"bos_token_id": None, "pad_token_id": None} | tokens | keys | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias", ".D")):  # these have ranges of their own
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


MODERN: dict[str, Callable[..., Path]] = {
    kind: partial(_model, kind, keys) for kind, keys in (DENSE | RECURRENT | MIXTURES).items()
}
