"""The decoder layer that Llama made usual, as parts of rows: separate projections, a gated MLP, no more."""

from __future__ import annotations

from surefoot.families.family import Key, Linear, Norm

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
