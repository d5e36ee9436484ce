"""Families with Llama's decoder layer: RMSNorm, rotary positions, a gated MLP. Llama, Mistral, Qwen, Phi-3, Gemma."""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.family import (
    Family,
    ForbiddenPad,
    Hazard,
    Key,
    Linear,
    Norm,
    Refusal,
    ReservedPad,
    Structure,
    UntrainedTurns,
    Window,
)

# The layer that Llama made usual: separate projections, a gated MLP, no more.
ATTENTION_BIAS = Key("attention_bias")
NORMS = (Norm("input_layernorm"), Norm("post_attention_layernorm"))
HEAD_NORMS = (Norm("self_attn.q_norm", "head", over="query"), Norm("self_attn.k_norm", "head", over="key_value"))
SANDWICH_NORMS = (*NORMS, Norm("pre_feedforward_layernorm"), Norm("post_feedforward_layernorm"))


def gated_linears(
    *, qkv_bias: Key | bool = False, output_bias: Key | bool = False, mlp_bias: Key | bool = False
) -> tuple[Linear, ...]:
    """q, k, v, o, gate, up, down under Llama's names."""
    return (
        Linear("q", "self_attn.q_proj", "hidden", ("query",), qkv_bias),
        Linear("k", "self_attn.k_proj", "hidden", ("key_value",), qkv_bias),
        Linear("v", "self_attn.v_proj", "hidden", ("key_value",), qkv_bias),
        Linear("o", "self_attn.o_proj", "query", ("hidden",), output_bias),
        Linear("gate", "mlp.gate_proj", "hidden", ("intermediate",), mlp_bias),
        Linear("up", "mlp.up_proj", "hidden", ("intermediate",), mlp_bias),
        Linear("down", "mlp.down_proj", "intermediate", ("hidden",), mlp_bias),
    )


# Llama 2 and 3.x, and the many models that share their architecture and say model_type "llama".
LLAMA_STRUCTURE = Structure(
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias=Key("mlp_bias")),
    layer_norms=NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    defaults={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
)
LLAMA = Family(
    name="llama",
    model_types=("llama",),
    # Llama was pretrained with BOS in front of every document, whether or not the tokenizer's post-processor adds it.
    uses_bos=True,
    structure=LLAMA_STRUCTURE,
    reserved_pads=(
        # Llama 3.1 and later. Llama 3.0 has no pad at all, and its id 0 is "!": padding with 0 pads with text.
        ReservedPad("<|finetune_right_pad_id|>", "reserved for padding in Llama 3.1 and later"),
        *(
            ReservedPad(f"<|reserved_special_token_{number}|>", "reserved in Llama 3 and used for nothing")
            for number in range(4)
        ),
        # Llama 2 spells unknown characters in bytes, so no text becomes <unk>.
        ReservedPad("<unk>", "text never becomes <unk>: unknown characters are spelled in bytes"),
    ),
    forbidden_pads=(ForbiddenPad("<|eot_id|>", "ends every turn: whoever masks padding by id would never train it"),),
    turn_ends=("<|eot_id|>", "<|eom_id|>"),
    templates=("llama3", "chatml", "zephyr", "llama2"),
    untrained_turns=UntrainedTurns(
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        vocab=128_256,
        told_by=("<|eot_id|>",),
        warning="a Llama 3 base model never saw its chat tokens in training, and an adapter leaves their embeddings as "
        "they are; add embed_tokens and lm_head to adapter.modules_to_save, or use data.template: alpaca",
    ),
)
# Llama 3.2 Vision: Llama 3.1's layers, and between them some that read pictures.
MLLAMA = replace(LLAMA, name="mllama", model_types=("mllama_text_model",), structure=None)


# Mistral 7B and its relatives. v0.1 has a sliding window of 4096, v0.2 and later write sliding_window: null.
MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    uses_bos=True,
    structure=replace(
        LLAMA_STRUCTURE,
        linears=gated_linears(),
        defaults={
            "hidden_act": "silu",
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    window=Window(),  # all layers
    reserved_pads=(
        ReservedPad("<pad>", "reserved for padding in the newer tokenizers (tekken)"),
        ReservedPad("[control_767]", "a control token of v0.3 that nothing uses"),
        # SentencePiece with byte fallback, as in Llama 2.
        ReservedPad("<unk>", "text never becomes <unk>: unknown characters are spelled in bytes"),
    ),
    templates=("chatml", "zephyr", "mistral"),  # what Zephyr and others were trained with comes first
)


# Qwen2 and 2.5: biases on q, k and v.
QWEN2_STRUCTURE = replace(
    LLAMA_STRUCTURE,
    linears=gated_linears(qkv_bias=True),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
)
QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    # bos_token_id in config.json is <|endoftext|>, which separated documents; the tokenizer has no BOS.
    uses_bos=False,
    structure=QWEN2_STRUCTURE,
    window=Window(when=(Key("use_sliding_window"),), from_layer="max_window_layers"),
    reserved_pads=(ReservedPad("<|endoftext|>", "what Qwen pads with; it separated documents in pretraining"),),
    forbidden_pads=(
        ForbiddenPad("<|im_end|>", "ends every turn: whoever masks padding by id would never train it"),
        ForbiddenPad("<|im_start|>", "begins every turn"),
    ),
    turn_ends=("<|im_end|>",),
    templates=("qwen",),
)
# No biases, but norms of queries and keys; head_dim is a field of its own.
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_types=("qwen3",),
    structure=replace(
        QWEN2_STRUCTURE,
        linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS),
        layer_norms=(*HEAD_NORMS, *NORMS),
        defaults={**QWEN2_STRUCTURE.defaults, "head_dim": 128, "attention_bias": False},
    ),
    templates=("qwen3",),
)


# Phi-3, 3.5 and 4 (text): q, k, v in one matrix, gate and up in another, so `q_proj` names nothing here.
PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    # The chat template begins with <|user|>; published tokenizers of the family disagree on <s>.
    uses_bos=None,
    structure=replace(
        LLAMA_STRUCTURE,
        linears=(
            Linear("q+k+v", "self_attn.qkv_proj", "hidden", ("query", "key_value", "key_value")),
            Linear("o", "self_attn.o_proj", "query", ("hidden",)),
            Linear("gate+up", "mlp.gate_up_proj", "hidden", ("intermediate", "intermediate")),
            Linear("down", "mlp.down_proj", "intermediate", ("hidden",)),
        ),
        defaults={
            "hidden_act": "silu",
            "sliding_window": None,
            "attention_dropout": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    dropouts=("resid_pdrop",),  # embd_pdrop is in config.json, and no module reads it
    window=Window(),  # all layers; 2047 in Phi-3-mini-4k
    reserved_pads=(
        ReservedPad("<|placeholder1|>", "a placeholder that nothing uses"),
        ReservedPad("<|dummy_0|>", "a placeholder of Phi-4 that nothing uses"),
        ReservedPad("<unk>", "text never becomes <unk>: unknown characters are spelled in bytes"),
    ),
    forbidden_pads=(ForbiddenPad("<|end|>", "ends every turn: whoever masks padding by id would never train it"),),
    turn_ends=("<|end|>", "<|im_end|>"),  # <|im_end|>: Phi-4
    templates=("phi3",),
)


# Gemma 2 and the text models of Gemma 3: norms before and after each half, embeddings scaled, head tied, <pad> = 0.
GEMMA2_STRUCTURE = replace(
    LLAMA_STRUCTURE,
    linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS),
    layer_norms=SANDWICH_NORMS,
    keys={"hidden_act": "hidden_activation"},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
)
GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    uses_bos=True,  # without <bos> the loss of a pretrained Gemma is several times as high
    structure=GEMMA2_STRUCTURE,
    window=Window(),  # every other layer
    # Asked for SDPA, transformers raises (Gemma2PreTrainedModel._supports_sdpa), whatever the cap is set to.
    without_sdpa="SDPA cannot cap attention logits, as Gemma 2 does (attn_logit_softcapping)",
    reserved_pads=(ReservedPad("<pad>", "reserved for padding"), ReservedPad("<unused0>", "used for nothing")),
    forbidden_pads=(
        ForbiddenPad("<end_of_turn>", "ends every turn: whoever masks padding by id would never train it"),
    ),
    turn_ends=("<end_of_turn>",),
    templates=("gemma",),
    hazards=(
        Hazard(
            "Gemma's hidden states go beyond 65 504, the largest fp16 number: expect overflows, and prefer bf16 or "
            "fp32 (transformers pull request 29402)",
            compute="fp16",
        ),
    ),
    refusals=(
        Refusal(Key("use_bidirectional_attention"), "every token sees those after it: the answer stands in the input"),
    ),
)
GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    model_types=("gemma3_text",),
    structure=replace(
        GEMMA2_STRUCTURE,
        layer_norms=(*HEAD_NORMS, *SANDWICH_NORMS),
        defaults={
            **GEMMA2_STRUCTURE.defaults,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
    window=Window(),  # five layers of six
    without_sdpa="",  # norms of queries and keys took the place of the cap
)
