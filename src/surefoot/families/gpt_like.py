"""Families with GPT-2's decoder layer: LayerNorm, biases, learned positions, a plain MLP. OPT and GPT-2."""

from __future__ import annotations

from surefoot.families.family import (
    Family,
    ForbiddenPad,
    Hazard,
    Key,
    Linear,
    Norm,
    Positions,
    Refusal,
    ReservedPad,
    Structure,
)

# OPT: positions begin at row 2; dropout is on unless config.json says 0.
_BIAS = Key("enable_bias")
_AFFINE = Key("layer_norm_elementwise_affine")

OPT = Family(
    name="opt",
    model_types=("opt",),
    uses_bos=True,
    structure=Structure(
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        linears=(
            Linear("k", "self_attn.k_proj", "hidden", ("hidden",), _BIAS),
            Linear("v", "self_attn.v_proj", "hidden", ("hidden",), _BIAS),
            Linear("q", "self_attn.q_proj", "hidden", ("hidden",), _BIAS),
            Linear("o", "self_attn.out_proj", "hidden", ("hidden",), _BIAS),
            Linear("up", "fc1", "hidden", ("intermediate",), _BIAS),
            Linear("down", "fc2", "intermediate", ("hidden",), _BIAS),
        ),
        layer_norms=(
            Norm("self_attn_layer_norm", bias=True, when=(_AFFINE,)),
            Norm("final_layer_norm", bias=True, when=(_AFFINE,)),
        ),
        # opt-350m normalizes after each half of a layer and not at the end.
        final_norm=Norm(
            "model.decoder.final_layer_norm",
            bias=True,
            when=(_AFFINE, Key("do_layer_norm_before"), Key("_remove_final_layer_norm", on=False)),
        ),
        head="lm_head",
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
            "tie_word_embeddings": True,
        },
        positions=Positions("model.decoder.embed_positions", offset=2),
        projections=(
            Linear("out", "model.decoder.project_out", "hidden", ("embedding",)),
            Linear("in", "model.decoder.project_in", "embedding", ("hidden",)),
        ),
    ),
    dropouts=("dropout", "layerdrop"),
    reserved_pads=(ReservedPad("<pad>", "reserved for padding"),),
    forbidden_pads=(
        ForbiddenPad(
            "</s>",
            "begins and ends every text: whoever masks padding by id would lose the first token and shift positions",
        ),
    ),
    hazards=(
        Hazard(
            "OPT's </s> is BOS and EOS at once: code that finds padding or the end of a text by id is off by one "
            "(DeepSpeedExamples issue 455); here both are found by position"
        ),
    ),
)


# GPT-2: Conv1D layers with weights of (inputs, outputs); dropout is on unless config.json says 0.
GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    # <|endoftext|> is listed as BOS and EOS; it separated documents in pretraining and began none of them.
    uses_bos=False,
    structure=Structure(
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
    ),
    dropouts=("resid_pdrop", "embd_pdrop"),
    refusals=(Refusal(Key("add_cross_attention"), "it attends to the output of an encoder that is not there"),),
)
