"""How much memory the run needs, by kind, from the shape of the model alone.

The counts follow what autograd keeps alive in transformers' decoder layers with PEFT's adapters (a test compares them
with the saved tensors themselves). Not counted: the libraries, an accelerator's cache, other programs; hence the
headroom.

Not everything is there at once. The peak is at the end of the forward pass, with logits; or as the first layer goes
backward, without; or at the end of the backward pass, when gradients have come as activations and cast copies went. In
a step of several passes the gradients of the first wait through the others.

What a decoder layer keeps for its backward pass, in bytes.
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.families.model_facts import ModuleFact
from surefoot.planning.expert_memory import expert_bytes
from surefoot.planning.plan import OFF, Choice, MemoryPlan, PackedType
from surefoot.planning.workload import BYTES, Workload
from surefoot.system.allocator import LARGE, Holes
from surefoot.system.messages import GIB

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
    return tokens * per_token + _dora_bytes(work) + _expert_bytes(work, tokens) + _rounded_bytes(work, tokens)


def _rounded_bytes(work: Workload, tokens: int) -> int:
    """What one layer keeps more under precision.qat: of each weight its rounded copy, which in autocast takes the place
    of the cast one, and where it trains what was rounded; of activations that are rounded as well the same."""
    if work.precision.qat.value == OFF:
        return 0
    model, trains, base = work.model, work.adapter is None, BYTES[work.precision.unpacked]
    linears = [module.linear for module in model.layer_linears if module.linear]
    copied = 0 if work.autocast and base == BYTES["fp32"] else base
    kept = sum(inputs * outputs for inputs, outputs in linears) * (copied + 4 * trains)
    if work.precision.qat.value == "int8-int4":
        inputs = sum(inputs for inputs, _ in linears)
        shared = model.layers * (2 * model.hidden + model.intermediate)  # that were kept without rounding
        kept += _residual(work) * tokens * (inputs + (inputs - shared if trains and not work.autocast else 0))
    return kept // model.layers


def _expert_bytes(work: Workload, tokens: int) -> int:
    """Under autocast a base of fp32 multiplies its experts in fp32: torch's grouped product is not cast."""
    width = BYTES[work.precision.unpacked] if work.adapter else BYTES["fp32"]
    return expert_bytes(work.model, work.adapter, tokens, width, fast=work.fast_adapter, cast=work.autocast)


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
        # `surefoot.kernels.pointwise` keeps x and 1 / rms of each row; tests/kernels counts what autograd holds.
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


# Left for what is not counted: 10 % for fragmentation, and the libraries (CPU) or the CUDA context with its workspaces.
_HEADROOM = 0.9
_LIBRARIES = GIB
# `surefoot.models.fast.last_block.WORTH_IT`: where a larger share of all rows is read, none is left out.
_WORTH_IT = 0.9
# Bytes of a packed matrix: for each weight and for each row. NF4: half a byte, a byte of scale for 64 weights, an fp32
# scale for 256 of these. int8: a byte, an fp32 scale for a row.
_PACKED: dict[PackedType, tuple[float, int]] = {"nf4": (0.5 + 1 / 64 + 4 / (64 * 256), 0), "int8": (1, 4)}
# Programs for products of 16 bits, 0.6 MiB each, of which a CPU run keeps 256 (`process.bound_product_caches`): where
# micro-batches have other numbers of tokens from step to step, all places are taken before long.
_PROGRAMS = 154 << 20
# Gradients inside the layer that is going backward, as a share of what the layer keeps.
_BACKWARD = 0.5


@dataclass(frozen=True)
class _Holes:
    """What a CPU run on glibc takes besides what is alive, see `surefoot.system.allocator`.

    left: bytes, by set-up, interpreter and products. of_layer: times what one layer keeps. Each asks for the same sizes
    when it goes forward, when it is computed again and when it goes backward, and cannot have all holes that the one
    before it left. of_kept: times all activations, between which there are holes until the backward pass. The logits of
    a piece have the place of those before. Blocks of `LARGE` bytes come from the system and leave none.
    """

    left: int
    of_layer: float
    of_kept: float


# Measured, see docs/evidence/memory.md.
_HOLES: Mapping[Holes, _Holes] = {
    "none": _Holes(0, 0.0, 0.0),
    "few": _Holes(40 << 20, 1.0, 0.1),
    "many": _Holes(32 << 20, 3.4, 0.1),
}


def forecast(
    work: Workload,
    *,
    examples: int,
    length: int,
    supervised: float,
    checkpointing: Choice[bool],
    available: int,
    recomputed: int | None = None,
    accumulation: int = 2,
) -> MemoryPlan:
    """The peak for micro-batches of so many examples, all padded to `length` tokens, of which a share carries loss.

    recomputed: see `MemoryPlan`.
    accumulation: forward passes of a step; what is more than one makes no difference.
    """
    tokens = examples * work.rows * length
    layers = work.model.layers
    per_layer = work.passes * layer_bytes(work, tokens, length)
    again = (layers if recomputed is None else min(recomputed, layers)) if checkpointing.value else 0
    # A layer that is computed again keeps its input. The first ones are: their turn comes when all others are through,
    # so that one layer's activations at a time come back into room that is free again.
    kept = work.passes * again * tokens * work.model.hidden * BYTES[work.precision.unpacked]
    positions = int(tokens * supervised)
    # The last layer is the last to be computed again: where it is, no room is taken off, as others need as much.
    unread = tokens - positions if work.prunes and again < layers and positions <= _WORTH_IT * tokens else 0
    less = work.passes * unread_bytes(work, unread)
    forward = kept + (layers - again) * per_layer - less
    # The last layer goes backward first, when it is all there.
    activations = kept + int((max(layers - again, 1) + _BACKWARD) * per_layer) - less
    logits = _logits(work, positions)
    weights = _frozen_bytes(work) + 4 * work.trainable + _cast_bytes(work) + adapter_copies(work)
    gradients = 4 * (work.trainable + work.learning)
    # The gradient of a layer's experts is one block, and no hole that activations leave has room for it.
    apart = work.holes != "none" and work.model.experts > 0 and work.adapter is None
    waiting = gradients if accumulation > 1 or apart else 0
    peak = max(
        waiting + forward + logits,
        waiting + activations,
        gradients - _cast_bytes(work) + int((1 + _BACKWARD) * per_layer),
    )
    return MemoryPlan(
        weights=weights + work.under + work.learning * (4 + (work.width if work.autocast else 0)),
        gradients=gradients,
        optimizer=work.optimizer,
        activations=activations,
        logits=logits,
        available=available,
        gradient_checkpointing=checkpointing,
        beside=work.beside,
        recomputed=again if again and again < layers else None,
        apart=gradients + activations + logits - peak,
        holes=_holes(work, activations, per_layer, tokens) + _programs(work),
    )


def _holes(work: Workload, activations: int, layer: int, tokens: int) -> int:
    model, b, holes = work.model, work.width, _HOLES[work.holes]
    share = 1.0  # of a layer, in blocks from the heap
    if tokens * model.hidden * b >= LARGE:
        share = 0.0
    elif tokens * model.intermediate * b >= LARGE:
        mlp = tokens * b * mlp_tensors(work) * model.intermediate
        share = max(0.0, 1 - work.passes * mlp / layer)
    return holes.left + int(share * (holes.of_layer * layer + holes.of_kept * activations))


def _programs(work: Workload) -> int:
    # Every expert has other numbers of rows in every pass; those of a base in fp32 are multiplied in fp32.
    varies = work.varies or (work.model.experts > 0 and work.adapter is not None and work.precision.unpacked != "fp32")
    counted = work.holes != "none" and work.kind == "cpu" and work.autocast and varies
    return _PROGRAMS if counted else 0


def usable(available: int) -> int:
    """Bytes that a forecast may fill."""
    return int(_HEADROOM * available) - _LIBRARIES


def fits(memory: MemoryPlan) -> bool:
    return memory.total <= usable(memory.available)


def base_bytes(work: Workload) -> int:
    """Of another copy of the base, frozen and held as this one is."""
    return 4 * work.parameters if work.adapter is None else _frozen_bytes(work)


def _cast_bytes(work: Workload) -> int:
    """Autocast keeps a cast copy of every fp32 weight that enters a product until its backward pass is over; but those
    of our adapter arithmetic stay, see `adapter_copies`."""
    if not work.autocast:
        return 0
    linear = sum(module.parameters for module in work.model.modules if module.linear)
    cast = work.trainable if work.adapter else linear
    if work.adapter and work.precision.base.value == "fp32":
        cast += linear
    return cast * work.width - adapter_copies(work)


def _frozen_bytes(work: Workload) -> int:
    if work.adapter is None:
        return 4 * (work.parameters - work.trainable)
    if (packed := work.precision.packed) is None:
        return work.parameters * BYTES[work.precision.unpacked]
    linears = [module.linear for module in work.model.modules if module.in_layer and module.linear]
    of_weight, of_row = _PACKED[packed]
    matrices = [inputs * outputs for inputs, outputs in linears]
    rest = (work.parameters - sum(matrices)) * BYTES[work.precision.unpacked]
    quantised = int(of_weight * sum(matrices)) + of_row * sum(outputs for _, outputs in linears)
    # One matrix at a time is dequantised for its product.
    return quantised + rest + max(matrices) * work.width


def _logits(work: Workload, positions: int) -> int:
    """At the end of the forward pass. In pieces: logits in the type of the products, whose place their gradient takes,
    and in 16 bits their softmax in fp32; a head that trains gets its gradient there and then, summed in fp32, and under
    autocast the product of a piece besides."""
    if not work.logits:
        return 0
    vocab, cast = work.model.vocab, work.width if work.autocast else 0
    if work.loss_rows is None:  # as computed, in fp32, their log-softmax, and the gradients of both ends
        return positions * vocab * (2 + 4 + 4 + 4 + 2 if work.autocast else 4 + 4 + 4)
    head = vocab * work.model.hidden * (4 + cast) if work.adapter is None else 0
    return min(positions, work.loss_rows) * vocab * (4 + cast) + head
