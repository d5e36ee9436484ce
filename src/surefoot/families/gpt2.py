"""GPT-2: Conv1D layers with weights of (inputs, outputs), learned positions, dropout on unless config.json says 0."""

from __future__ import annotations

from surefoot.families.family import Family, Key, Linear, Norm, Positions, Refusal

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    embedding="transformer.wte",
    layers="transformer.h",
    linears=(
        Linear("q+k+v", "attn.c_attn", "hidden", ("query", "key_value", "key_value"), bias=True, transposed=True),
        Linear("o", "attn.c_proj", "query", ("hidden",), bias=True, transposed=True),
        Linear("up", "mlp.c_fc", "hidden", ("intermediate",), bias=True, transposed=True),
        Linear("down", "mlp.c_proj", "intermediate", ("hidden",), bias=True, transposed=True),
    ),
    layer_norms=(Norm("ln_1", bias=True), Norm("ln_2", bias=True)),
    final_norm=Norm("transformer.ln_f", bias=True),
    head="lm_head",
    # <|endoftext|> is listed as BOS and EOS; it separated documents in pretraining and began none of them.
    uses_bos=False,
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "attention_dropout": "attn_pdrop",
        "hidden_act": "activation_function",
    },
    defaults={
        "activation_function": "gelu_new",
        "n_inner": None,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    },
    intermediate_per_hidden=4,
    positions=Positions("transformer.wpe"),
    dropouts=("resid_pdrop", "embd_pdrop"),
    refusals=(Refusal(Key("add_cross_attention"), "it attends to the output of an encoder that is not there"),),
)
