"""Gemma 2 and the text models of Gemma 3: norms before and after each half, embeddings scaled, head tied, <pad> = 0."""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.family import Family, ForbiddenPad, Hazard, Key, Norm, Refusal, ReservedPad, Window
from surefoot.families.gated import ATTENTION_BIAS, HEAD_NORMS, SANDWICH_NORMS, gated_linears

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=gated_linears(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS),
    layer_norms=SANDWICH_NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    uses_bos=True,  # without <bos> the loss of a pretrained Gemma is several times as high
    keys={"hidden_act": "hidden_activation"},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    window=Window(),  # every other layer
    # Asked for SDPA, transformers raises (Gemma2PreTrainedModel._supports_sdpa), whatever the cap is set to.
    without_sdpa="SDPA cannot cap attention logits, as Gemma 2 does (attn_logit_softcapping)",
    beyond_head="Gemma 2 caps its logits (final_logit_softcapping)",
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
    layer_norms=(*HEAD_NORMS, *SANDWICH_NORMS),
    defaults={**GEMMA2.defaults, "use_bidirectional_attention": False},
    window=Window(),  # five layers of six
    beyond_head="",
    without_sdpa="",  # norms of queries and keys took the place of the cap
)
