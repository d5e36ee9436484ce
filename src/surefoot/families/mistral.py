"""Mistral 7B and its relatives. v0.1 has a sliding window of 4096, v0.2 and later write sliding_window: null."""

from __future__ import annotations

from surefoot.families.family import Family, Norm, ReservedPad, Window
from surefoot.families.gated import NORMS, gated_linears

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    embedding="model.embed_tokens",
    layers="model.layers",
    linears=gated_linears(),
    layer_norms=NORMS,
    final_norm=Norm("model.norm"),
    head="lm_head",
    uses_bos=True,
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    window=Window(),  # all layers
    reserved_pads=(
        ReservedPad("<pad>", "reserved for padding in the newer tokenizers (tekken)"),
        ReservedPad("[control_767]", "a control token of v0.3 that nothing uses"),
        # SentencePiece with byte fallback, as in Llama 2.
        ReservedPad("<unk>", "text never becomes <unk>: unknown characters are spelled in bytes"),
    ),
    templates=("chatml", "zephyr", "mistral"),  # what Zephyr and others were trained with comes first
)
