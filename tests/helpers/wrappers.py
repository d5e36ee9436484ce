"""Tiny vision-language checkpoints: language models in a wrapper, as transformers saves them, with a tokenizer.

Only sizes are shrunk. Vision towers have random weights too, so that a change of them, or an effect on text, is
noticed. Qwen3.5's has two tensors of a multi-token-prediction head, for which transformers has no module.

    folder = wrapper("qwen3_5", tmp_path / "qwen3_5")
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from helpers import zoo_templates, zoo_tokenizers
from helpers.zoo_modern import GEMMA3N_TEXT

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.16,
}
_HYBRID = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
_QWEN_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_PIXTRAL = _SIGLIP | {"model_type": "pixtral", "head_dim": 8}
_MLLAMA_EYE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 32,
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# model_type -> text_config, vision_config and what stands beside them.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (_TEXT | _HYBRID, _QWEN_EYE | {"num_position_embeddings": 16}, {"tie_word_embeddings": True}),
    "qwen3_5_moe": (
        _TEXT | _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 16},
        _QWEN_EYE | {"num_position_embeddings": 16},
        {},
    ),
    "qwen2_5_vl": (
        _TEXT | _MROPE,
        _QWEN_EYE | {"fullatt_block_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        _TEXT | {"head_dim": 8} | {"rope_parameters": _HYBRID["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        _QWEN_EYE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "gemma3": (
        _TEXT | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 16, "num_hidden_layers": 6},
        _SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "gemma3n": (
        _TEXT | GEMMA3N_TEXT | {"head_dim": 8, "sliding_window": 16},
        {
            "architecture": "mobilenetv5_300m_enc",
            "model_args": {"channel_multiplier": 0.01, "msfa_output_resolution": 2},
        },
        {
            "vision_soft_tokens_per_image": 4,
            "audio_config": {
                "hidden_size": 16,
                "conf_num_hidden_layers": 1,
                "conf_num_attention_heads": 2,
                "sscp_conv_channel_size": [4, 4],
            },
        },
    ),
    "gemma4": (
        _TEXT | _GEMMA4 | {"hidden_size_per_layer_input": 8},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        {},
    ),
    "gemma4_unified": (_TEXT | _GEMMA4, {"mm_embed_dim": 16, "output_proj_dims": 16}, {}),
    "mistral3": (
        _TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        _PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "llama4": (
        _TEXT
        | {
            "head_dim": 8,
            "intermediate_size": 16,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 256,
        },
        _SIGLIP
        | {"model_type": "llama4_vision_model", "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "glm4v": (
        _TEXT | _MROPE,
        _QWEN_EYE | {"out_hidden_size": 32, "image_size": 16, "patch_size": 8},
        {},
    ),
    "mllama": (
        _TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1]} | {"rope_parameters": _DEFAULT_ROPE},
        _MLLAMA_EYE,
        {},
    ),
    "glm46v": (
        _TEXT | _MROPE | {"model_type": "glm4v_text"},
        _QWEN_EYE | {"model_type": "glm4v_vision", "out_hidden_size": 32, "image_size": 32, "patch_size": 8},
        {},
    ),
    "lfm2_vl": (
        _TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        _SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        {"projector_hidden_size": 24},
    ),
    "internvl": (
        _TEXT | {"model_type": "qwen3", "head_dim": 8},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
        },
        {"tie_word_embeddings": False},
    ),
    "paddleocr_vl": (
        _TEXT | _MROPE | {"head_dim": 8, "tie_word_embeddings": True},
        _SIGLIP | {"model_type": "paddleocr_vl_vision", "spatial_merge_size": 2},
        {"tie_word_embeddings": True},
    ),
    "llava": (_TEXT | {"model_type": "qwen2"}, _SIGLIP, {}),
    "smolvlm": (_TEXT | {"model_type": "llama"}, _SIGLIP | {"model_type": "smolvlm_vision"}, {}),
}
MTP = {"mtp.fc.weight": (32, 64), "mtp.layers.0.self_attn.q_proj.weight": (64, 32)}
PREPROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8}


def wrapper(name: str, folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Write a model folder that `from_pretrained` reads. text: other keys of text_config."""
    if name == "gemma3n":
        pytest.importorskip("timm")
    gemma = name.startswith("gemma")
    if gemma:
        zoo_tokenizers.gemma(folder, zoo_templates.GEMMA3, image=False)
    else:
        zoo_tokenizers.qwen(folder, zoo_templates.QWEN25, thinks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    stop = "<end_of_turn>" if gemma else "<|im_end|>"
    own, eye, others = WRAPPERS[name]
    config_class = CONFIG_MAPPING[name]
    language = own | {"vocab_size": len(tokenizer) + 6, "eos_token_id": ids[stop], "pad_token_id": 0} | text
    if gemma:
        language |= {"bos_token_id": ids["<bos>"]}
    torch.manual_seed(seed)
    config = config_class(text_config=language, vision_config=eye, **others)
    for key in ("image_token_id", "video_token_id", "audio_token_id", "image_token_index"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, len(tokenizer) + 1)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and not key.endswith(("A_log", "dt_bias")):  # these have ranges of their own
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(eos_token_id=[ids[stop]])
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    if name == "qwen3_5":
        heads = {key: torch.randn(shape, dtype=torch.bfloat16) for key, shape in MTP.items()}
        save_file(load_file(folder / "model.safetensors") | heads, folder / "model.safetensors", {"format": "pt"})
    return folder


# By a name of its own beside those of causal models.
SEEING: dict[str, Callable[..., Path]] = {f"{name}+vision": partial(wrapper, name) for name in WRAPPERS}
