"""Llama 2 and 3.x, and the many models that share their architecture and say model_type "llama"."""

from __future__ import annotations

from surefoot.families.family import Family, ForbiddenPad, Key, Norm, ReservedPad, UntrainedTurns
from surefoot.families.gated import ATTENTION_BIAS, NORMS, gated_linears

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias=Key("mlp_bias")),
    layer_norms=NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    # Llama was pretrained with BOS in front of every document, whether or not the tokenizer's post-processor adds it.
    uses_bos=True,
    defaults={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
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
