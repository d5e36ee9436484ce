"""Llama 2 and 3.x, and the many models that share their architecture and say model_type "llama"."""

from __future__ import annotations

from surefoot.families.family import Family, Linear, ReservedPad, UntrainedTurns

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=(
        Linear("q", "self_attn.q_proj", "hidden", "query", bias="attention_bias"),
        Linear("k", "self_attn.k_proj", "hidden", "key_value", bias="attention_bias"),
        Linear("v", "self_attn.v_proj", "hidden", "key_value", bias="attention_bias"),
        Linear("o", "self_attn.o_proj", "query", "hidden", bias="attention_bias"),
        Linear("gate", "mlp.gate_proj", "hidden", "intermediate", bias="mlp_bias"),
        Linear("up", "mlp.up_proj", "hidden", "intermediate", bias="mlp_bias"),
        Linear("down", "mlp.down_proj", "intermediate", "hidden", bias="mlp_bias"),
    ),
    layer_norms=("input_layernorm", "post_attention_layernorm"),
    final_norm="model.norm",
    head="lm_head",
    # Llama was pretrained with BOS in front of every document, whether or not the tokenizer's post-processor adds it.
    uses_bos=True,
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
    turn_ends=("<|eot_id|>", "<|eom_id|>"),
    untrained_turns=UntrainedTurns(
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        vocab=128_256,
        told_by=("<|eot_id|>",),
        warning="a Llama 3 base model never saw its chat tokens in training, and an adapter leaves their embeddings as "
        "they are; add embed_tokens and lm_head to adapter.modules_to_save, or use data.template: alpaca",
    ),
)
