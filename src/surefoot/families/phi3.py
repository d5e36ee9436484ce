"""Phi-3, 3.5 and 4 (text): q, k, v in one matrix, gate and up in another, so `q_proj` names nothing here."""

from __future__ import annotations

from surefoot.families.family import Family, ForbiddenPad, Linear, Norm, ReservedPad, Window
from surefoot.families.gated import NORMS

PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=(
        Linear("q+k+v", "self_attn.qkv_proj", "hidden", ("query", "key_value", "key_value")),
        Linear("o", "self_attn.o_proj", "query", ("hidden",)),
        Linear("gate+up", "mlp.gate_up_proj", "hidden", ("intermediate", "intermediate")),
        Linear("down", "mlp.down_proj", "intermediate", ("hidden",)),
    ),
    layer_norms=NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    # The chat template begins with <|user|>; published tokenizers of the family disagree on <s>.
    uses_bos=None,
    defaults={
        "hidden_act": "silu",
        "sliding_window": None,
        "attention_dropout": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
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
