"""config.json of published models, reduced to what decides their shapes: Qwen3.5-35B-A3B, gpt-oss-20b, Qwen3-VL-8B."""

import json
from pathlib import Path
from typing import Any

from helpers import zoo_tokenizers
from helpers.seeing import TEMPLATE

_EYE = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
        },
        "vision_config": {**_EYE, "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "Qwen3-VL-8B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
        },
        "vision_config": {
            **_EYE,
            "model_type": "qwen3_vl",
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}


def published(name: str, folder: Path) -> Path:
    """Write a model folder without weights and with a small tokenizer, enough to plan for another machine."""
    zoo_tokenizers.qwen(folder, TEMPLATE, thinks=False)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return folder
