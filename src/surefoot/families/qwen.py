"""Qwen2 and 2.5 (biases on q, k, v) and Qwen3 (none, but norms of queries and keys; head_dim is a field of its own)."""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.family import Family, ForbiddenPad, Key, Norm, ReservedPad, Window
from surefoot.families.gated import ATTENTION_BIAS, HEAD_NORMS, NORMS, gated_linears

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=gated_linears(qkv_bias=True),
    layer_norms=NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    # bos_token_id in config.json is <|endoftext|>, which separated documents; the tokenizer has no BOS.
    uses_bos=False,
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    window=Window(when=(Key("use_sliding_window"),), from_layer="max_window_layers"),
    reserved_pads=(ReservedPad("<|endoftext|>", "what Qwen pads with; it separated documents in pretraining"),),
    forbidden_pads=(
        ForbiddenPad("<|im_end|>", "ends every turn: whoever masks padding by id would never train it"),
        ForbiddenPad("<|im_start|>", "begins every turn"),
    ),
    turn_ends=("<|im_end|>",),
    templates=("qwen",),
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_types=("qwen3",),
    templates=("qwen3",),
    linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS),
    layer_norms=(*HEAD_NORMS, *NORMS),
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
)
