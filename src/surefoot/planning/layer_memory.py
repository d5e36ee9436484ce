"""What one decoder layer keeps for its backward pass, in bytes.

Per token and layer, with h hidden, i intermediate, q = heads * head_dim, k = kv_heads * head_dim, b bytes of the
compute dtype; norms are computed in fp32 whatever the dtype:
    norms                their input 4h each (q and k where heads are normalised); an RMSNorm that trains keeps the
                         normalised input as well
    attention            queries, keys, values, output b * (2q + 2k), one fp32 row statistic per head; a fused q, k, v
                         stays whole behind the rotated q and k. In packed rows by sdpa, also the row that single
                         documents' outputs are joined to, b * q
    MLP                  what the activation keeps, b * i each (see _ACTIVATION); with a gate its output and up besides
    linear inputs        shared between q, k, v and gate, up in fp32; under autocast every layer casts a copy of its own
    dropout              a mask after each half of the layer, b * h each
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.families.model_facts import ModuleFact
from surefoot.planning.workload import BYTES, Workload

# How many tensors of the MLP's width an activation keeps besides its output: relu none, gelu_new is written out in
# seven operations. Others keep their input.
_ACTIVATION = {"relu": 0, "gelu_new": 4}
# Linear layers whose output is kept as it is by what comes behind them.
_KEPT_ANYWAY = ("v_proj", "gate_proj", "up_proj", "gate_up_proj")
# `surefoot.kernels.packed_attention.SHORT`: the form matmul writes documents of so many tokens at most into the row.
_SHORT = 384


def layer_bytes(work: Workload, tokens: int, length: int) -> int:
    """What one decoder layer keeps for its backward pass."""
    model, b = work.model, work.width
    if work.fast_adapter:  # one input for all layers that share it; attention's output is kept already
        linear_inputs = b * (2 * model.hidden + model.intermediate)
    elif work.autocast:
        adapted = work.adapter is not None
        linear_inputs = b * (_adapted_inputs(work) if adapted else _inputs(model.layer_linears) // model.layers)
    else:  # with dropout on the adapter's input, its output is kept instead
        linear_inputs = 0 if work.adapter and work.adapter.dropout else 4 * (2 * model.hidden + model.intermediate)
    mlp = mlp_tensors(work)
    dropped = 2 * b * model.hidden if model.dropouts else 0
    per_token = _norm_bytes(work) + _attention_bytes(work, length) + b * mlp * model.intermediate
    per_token += dropped + linear_inputs + (_adapter_token_bytes(work) if work.adapter else 0)
    return tokens * per_token + _dora_bytes(work)


def unread_bytes(work: Workload, rows: int) -> int:
    """What the last layer does not keep for so many rows that nobody reads, under `kernels.last_block: pruned`: behind
    attention the norm's input, and of the MLP the products and what enters them. A layer that is computed again keeps
    none of it in either case, but needs as much less room while it is. At least so much: adapters' A x is not in it."""
    model, b = work.model, work.width
    mlp = mlp_tensors(work)
    norm = _residual(work) if work.fused_norms else 4
    return rows * (norm * model.hidden + b * (mlp * model.intermediate + model.hidden + model.intermediate))


def mlp_tensors(work: Workload) -> int:
    """How many tensors of the MLP's width it keeps: what the activation does, its output and up."""
    return _ACTIVATION.get(work.model.activation, 1) + (2 if work.model.gated else 0)


def _norm_bytes(work: Workload) -> int:
    """Per token and layer."""
    if work.fused_norms:
        # As `surefoot.kernels.pointwise.stored_bytes` has it.
        return sum(_residual(work) * work.model.size(norm) + 4 for norm in work.model.norms)
    size = sum(4 * work.model.size(norm) for norm in work.model.norms)
    # LayerNorm's backward pass computes the normalised input again.
    return size if work.adapter or work.model.layer_norm else 2 * size


def _residual(work: Workload) -> int:
    """Bytes of a number of what goes from layer to layer: embeddings are not cast."""
    return BYTES[work.precision.unpacked] if work.adapter else BYTES["fp32"]


def _attention_bytes(work: Workload, length: int) -> int:
    """Per token and layer. Of a packed row, those of the document that takes most, which need not be the longest."""
    model, b = work.model, work.width
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    fused = b * (q + k) if model.fused_rotary else 0
    flash = b * (2 * q + 2 * k) + 4 * model.heads
    if work.documents == "matmul" and length <= _SHORT:
        return fused + flash
    joined = b * q if work.documents in ("matmul", "sdpa") else 0  # outputs of single documents, and the row of them
    if work.attention.expected.value not in ("eager", "math"):
        return fused + flash + joined
    # Probabilities in fp32 and, under autocast, once more in 16 bits.
    scores = 4 + (b if work.autocast else 0)
    scores += b if model.without_sdpa else 0  # capped: the cap keeps them too
    scores += 2 * b if model.attention_dropout else 0  # mask and what is left
    return fused + scores * model.heads * length + b * 4 * q


def _inputs(modules: Sequence[ModuleFact]) -> int:
    return sum(module.linear[0] for module in modules if module.linear)


def _adapted(work: Workload) -> list[tuple[int, int]]:
    """(inputs, outputs) of the adapted linear layers, over all decoder layers."""
    names = set(work.adapter.targets.value) if work.adapter else set()
    return [module.linear for module in work.model.modules if module.linear and module.name in names]


def adapter_copies(work: Workload) -> int:
    """Bytes of A and s B in the type of the products, which our adapter arithmetic makes once for all of a step."""
    if work.adapter is None or not work.fast_adapter:
        return 0
    return work.width * work.adapter.rank * sum(inputs + outputs for inputs, outputs in _adapted(work))


def _adapted_inputs(work: Workload) -> int:
    return sum(inputs for inputs, _ in _adapted(work)) // work.model.layers


def _adapter_token_bytes(work: Workload) -> int:
    """A x of each target; dropout's mask and output; DoRA's more copies of outputs: PEFT's two, or ours."""
    assert work.adapter is not None
    b = work.width
    count = len(_adapted(work)) / work.model.layers
    size = int(count * work.adapter.rank * b)
    if work.adapter.dropout:
        size += 4 * _adapted_inputs(work) * (1 if work.autocast else 2)
    if work.adapter.kind.value == "dora":
        outputs = sum(outputs for _, outputs in _adapted(work)) // work.model.layers
        size += b * (_own_copies(work) if work.fast_adapter else 2 * outputs)
    return size


def _own_copies(work: Workload) -> int:
    """Per token and layer, numbers of outputs that our DoRA keeps and nobody else does. Without bias and dropout it
    keeps the output itself, as do attention (of the values) and the MLP."""
    assert work.adapter is not None
    names = set(work.adapter.targets.value)
    numbers = 0
    for module in work.model.modules:
        if module.linear is None or module.name not in names:
            continue
        inputs, outputs = module.linear
        alone = module.parameters > inputs * outputs or work.adapter.dropout > 0
        numbers += outputs if alone or not module.name.endswith(_KEPT_ANYWAY) else 0
    return numbers // work.model.layers


def _dora_bytes(work: Workload) -> int:
    """PEFT multiplies B A out by way of an identity matrix of every target's input size, and keeps it.

    With dropout it multiplies by the base weight twice, the second time with a cast copy.
    """
    if work.adapter is None or work.adapter.kind.value != "dora" or work.fast_adapter:
        return 0
    copied = work.autocast and work.adapter.dropout > 0
    numbers = sum(inputs * inputs + copied * inputs * outputs for inputs, outputs in _adapted(work))
    return work.width * numbers // work.model.layers
