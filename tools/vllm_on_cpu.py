"""Plugin of vLLM 0.32 for `make served` alone: what of it fails on a CPU, in plain torch.

How vLLM reads an adapter (names, order of experts and ranks, scale) stays its own, as do its other layers. Replaced are

| of vLLM | why |
|---|---|
| `TritonExperts.apply`, experts where adapters are on | Triton's kernels alone |
| `cpu_gdn_attention_core`, Gated DeltaNet in fp32 | it asserts bf16 |

Shapes: T tokens, C channels in, H heads, K and V channels of a head's key and value.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as gdn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

_own_gated_delta = gdn.cpu_gdn_attention_core


def register() -> None:
    """vLLM calls it in each of its processes before it loads a model."""
    TritonExperts.apply = apply_experts
    gdn.cpu_gdn_attention_core = gated_delta


def apply_experts(
    self: TritonExperts,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """output, hidden_states: [T, C]; w1: [experts, 2 inner, C], gates first; w2: [experts, C, inner]."""
    lora = self._lora_context
    slots = lora.punica_wrapper.token_lora_indices[: len(hidden_states)]  # of each token's adapter; -1: none
    output.zero_()
    for expert in range(len(w1)):
        for slot in slots.unique().tolist():
            rows, places = torch.where((topk_ids == expert) & (slots == slot)[:, None])
            gate, up = adapted(
                hidden_states[rows], w1[expert], lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, slot, expert
            ).chunk(2, dim=-1)
            out = adapted(F.silu(gate) * up, w2[expert], lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, slot, expert)
            output.index_add_(0, rows, out * topk_weights[rows, places, None].to(out.dtype))


def adapted(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    first: tuple[torch.Tensor, ...],
    second: tuple[torch.Tensor, ...],
    slot: int,
    expert: int,
) -> torch.Tensor:
    """first, second: A and B, scaled, [slots, experts, …] for each part of the outputs."""
    own = inputs @ weight.T
    if slot < 0:
        return own
    pairs = zip(first, second, strict=True)
    return own + torch.cat([inputs @ a[slot, expert].T @ b[slot, expert].T for a, b in pairs], dim=-1)


def gated_delta(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """S_t = α_t S_{t-1} + β_t (v_t − α_t S_{t-1} k_t) k_tᵀ, o_t = S_t q_t (Yang et al. 2024, arXiv:2412.06464).

    mixed_qkv: [T, channels], before the convolution; b, a: [T, H]; core_attn_out: [T, H, V], is filled.
    """
    if mixed_qkv.dtype == torch.bfloat16:
        return _own_gated_delta(mixed_qkv, b, a, core_attn_out, layer_name)
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a rehearsal
        return None
    plan = context.attn_metadata[layer.prefix]
    starts, slots = plan.non_spec_query_start_loc.tolist(), plan.non_spec_state_indices_tensor.tolist()
    weight = layer.conv1d.weight
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin == end:
            continue
        recent, state = layer.kv_cache[0][slots[number]], layer.kv_cache[1][slots[number]]
        recent = recent if recent.shape[-1] == len(weight) else recent.T
        if number >= plan.num_decodes and not plan.has_initial_state[number]:
            recent.zero_()
            state.zero_()
        seen = torch.cat([recent, mixed_qkv[begin:end]])
        recent.copy_(seen[-len(recent) :])
        mixed = F.silu(F.conv1d(seen.T[None], weight, layer.conv1d.bias, groups=len(weight))[0].T)
        query, key, value = (one[0] for one in layer.rearrange_mixed_qkv(mixed))
        share = value.shape[1] // key.shape[1]
        query, key = (one.repeat_interleave(share, dim=1) for one in (query, key))
        query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
        query = query * query.shape[-1] ** -0.5
        kept = (-layer.A_log.exp() * F.softplus(a[begin:end] + layer.dt_bias)).exp()
        strength = b[begin:end].sigmoid()
        for place in range(end - begin):
            state.mul_(kept[place, :, None, None])
            told = torch.einsum("hvk,hk->hv", state, key[place])
            change = (value[place] - told) * strength[place, :, None]
            state.add_(change[:, :, None] * key[place, :, None])
            core_attn_out[begin + place] = torch.einsum("hvk,hk->hv", state, query[place])
    return None
