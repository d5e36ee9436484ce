"""OPT: LayerNorm and biases throughout, learned positions that begin at row 2, dropout on unless config.json says 0."""

from __future__ import annotations

from surefoot.families.family import Family, ForbiddenPad, Hazard, Key, Linear, Norm, Positions, ReservedPad

_BIAS = Key("enable_bias")
_AFFINE = Key("layer_norm_elementwise_affine")

OPT = Family(
    name="opt",
    model_types=("opt",),
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
    # opt-350m normalises after each half of a layer and not at the end.
    final_norm=Norm(
        "model.decoder.final_layer_norm",
        bias=True,
        when=(_AFFINE, Key("do_layer_norm_before"), Key("_remove_final_layer_norm", on=False)),
    ),
    head="lm_head",
    uses_bos=True,
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
