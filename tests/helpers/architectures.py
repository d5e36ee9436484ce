"""config.json of every family, tiny and as published, and the model that transformers builds from it."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from helpers.model_layouts import LLAMA31_8B

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 128,
}
LLAMA = LLAMA31_8B | _SIZES
MISTRAL = _SIZES | {"model_type": "mistral", "sliding_window": 16}
QWEN2 = _SIZES | {"model_type": "qwen2", "tie_word_embeddings": False}
QWEN3 = _SIZES | {"model_type": "qwen3", "head_dim": 16}
PHI3 = _SIZES | {"model_type": "phi3", "sliding_window": 16, "pad_token_id": 0, "resid_pdrop": 0.0}
GEMMA2 = _SIZES | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "sliding_window_pattern": 2}
OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 70,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 70,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "opt": OPT,
    "gpt2": GPT2,
}
# Sizes of published models, with the number of parameters that their cards or files give.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral-7B-v0.1": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Phi-3-mini-4k": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
            "resid_pdrop": 0.0,
        },
        3_821_079_552,
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        999_885_952,
    ),
    "opt-125m": (
        {
            "model_type": "opt",
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
        },
        125_239_296,
    ),
    "opt-350m": (
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}


def build(config: dict[str, Any], *, device: str = "meta", **options: Any) -> PreTrainedModel:
    """Return transformers' model of a config.json; on the meta device, its weights take no memory."""
    keys = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**keys), **options)


def window_of(model: PreTrainedModel, tokens: int = 40) -> int | None:
    """Return how many tokens a layer of the built model attends to, including the query's own; None if all `tokens`.

    Masked positions have attention weights of exactly 0; no other weight of such a small model is 0.
    """
    model.set_attn_implementation("eager")
    ids = torch.arange(tokens).remainder(60)[None] + 3
    with torch.no_grad():
        layers = model.eval()(input_ids=ids, output_attentions=True, use_cache=False).attentions
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    widths = [int(distance[(weights[0] > 0).any(0)].max()) + 1 for weights in layers]
    return min(widths) if min(widths) < tokens else None
