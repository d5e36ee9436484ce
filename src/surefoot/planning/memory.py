"""Forecast how much memory the run needs, by kind, from the shape of the model alone.

The counts follow what autograd keeps alive in transformers' decoder layers with PEFT's adapters (a test compares them
with the saved tensors themselves). Libraries, an accelerator's cache and other programs are not counted; the headroom
covers them.

Not everything exists at once. The peak is at the end of the forward pass, with logits; or when the first layer runs
backward, without them; or at the end of the backward pass, when gradients have replaced activations and cast copies. In
gradient accumulation the gradients of the first pass exist during the others.

What a decoder layer keeps for its backward pass, in bytes per token and layer, with h hidden, i intermediate,
q = heads * head_dim, k = kv_heads * head_dim, b bytes of the compute dtype; norms are computed in fp32 in every dtype:
    norms                their input 4h each (q and k if heads are normalized); a trained RMSNorm also keeps the
                         normalized input
    attention            queries, keys, values, output b * (2q + 2k), one fp32 row statistic per head; a fused q, k, v
                         is kept whole in addition to the rotated q and k. In packed rows with sdpa also the row into
                         which the outputs of single documents are joined, b * q
    MLP                  what the activation keeps, b * i each (see _ACTIVATION); with a gate also its output and up
    linear inputs        shared between q, k, v and gate, up in fp32; under autocast every layer casts its own copy
    dropout              a mask after each half of the layer, b * h each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.families.model_facts import ModuleFact
from surefoot.planning.experts import expert_bytes, largest_gradient
from surefoot.planning.fast_paths import COMPARED_AT_ONCE
from surefoot.planning.plan import OFF, QAT_BLOCKS, Choice, MemoryPlan, PackedType
from surefoot.planning.states import states_bytes
from surefoot.planning.workload import BYTES, Workload
from surefoot.system.allocator import LARGE, Holes
from surefoot.system.messages import GIB

# Number of tensors of the MLP's width that an activation keeps besides its output: relu none; gelu_new consists of
# seven operations. Others keep their input.
_ACTIVATION = {"relu": 0, "gelu_new": 4}
# Linear layers whose output is kept by the next operation anyway.
_KEPT_ANYWAY = ("v_proj", "gate_proj", "up_proj", "gate_up_proj")
# `surefoot.kernels.packed_attention.SHORT`: documents up to this length are written into the row by the form matmul.
_SHORT = 384


def layer_bytes(work: Workload, tokens: int, length: int) -> int:
    """Bytes that one decoder layer keeps for its backward pass."""
    model, b = work.model, work.width
    if work.fast_adapter or work.precision.packed:  # one input for all that share it; attention's output is counted
        linear_inputs = b * (2 * model.hidden + model.intermediate)
    elif work.autocast:
        adapted = work.adapter is not None
        linear_inputs = b * (_adapted_inputs(work) if adapted else _inputs(model.layer_linears) // model.layers)
    else:  # with dropout on the adapter's input, its output is kept instead
        linear_inputs = 0 if work.adapter and work.adapter.dropout else 4 * (2 * model.hidden + model.intermediate)
    dropped = 2 * b * model.hidden if model.dropouts else 0
    per_token = _norm_bytes(work) + _attention_bytes(work, length) + b * mlp_tensors(work) * model.intermediate
    per_token += dropped + linear_inputs + states_bytes(work) + (_adapter_token_bytes(work) if work.adapter else 0)
    return tokens * per_token + _dora_bytes(work) + _expert_bytes(work, tokens) + _rounded_bytes(work, tokens)


def _rounded_bytes(work: Workload, tokens: int) -> int:
    """Additional bytes that one layer keeps under precision.qat: the rounded copy of each weight (under autocast it
    replaces the cast copy) and, if it is trained, the rounding mask (not of floats); the same for activations."""
    if (qat := work.precision.qat.value) == OFF:
        return 0
    model, trains, base = work.model, work.adapter is None, BYTES[work.precision.unpacked]
    linears = [module.linear for module in model.layer_linears if module.linear]
    copied = 0 if work.autocast and base == BYTES["fp32"] else base
    masks, inputs = qat not in QAT_BLOCKS, sum(inputs for inputs, _ in linears)
    kept = sum(inputs * outputs for inputs, outputs in linears) * (copied + 4 * trains * masks)
    if qat not in ("int4", "int8"):
        shared = model.layers * (2 * model.hidden + model.intermediate)  # unrounded; under autocast attention's output
        again = work.width * model.layers * model.hidden if work.autocast else work.residual * (inputs - shared)
        kept += tokens * (work.residual * inputs * masks + again * trains)
    return kept // model.layers


def _expert_bytes(work: Workload, tokens: int) -> int:
    """Bytes of the experts. Under autocast an fp32 base multiplies its experts in fp32: grouped products are not
    cast."""
    width = BYTES[work.precision.unpacked] if work.adapter else BYTES["fp32"]
    return expert_bytes(work.model, work.adapter, tokens, width, fast=work.fast_experts, cast=work.autocast)


def unread_bytes(work: Workload, rows: int) -> int:
    """Bytes that the last layer does not keep for rows whose output is not needed (`kernels.last_block: pruned`): after
    attention the norm's input, and in the MLP the products and their inputs. A recomputed layer keeps none of this in
    either case, but needs that much less while it is recomputed. A lower bound: adapters' A x is not included."""
    model, b = work.model, work.width
    mlp = mlp_tensors(work)
    norm = work.residual if work.fused_norms else 4
    return rows * (norm * model.hidden + b * (mlp * model.intermediate + model.hidden + model.intermediate))


def mlp_tensors(work: Workload) -> int:
    """Number of tensors of the MLP's width that a layer keeps: those of the activation, its output and up."""
    if work.fused_gates:  # `surefoot.kernels.liger` keeps gate and up
        return 2
    return _ACTIVATION.get(work.model.activation, 1) + (2 if work.model.gated else 0)


def _norm_bytes(work: Workload) -> int:
    """Bytes per token and layer."""
    if work.fused_norms:
        # `surefoot.kernels.pointwise` keeps x and 1 / rms of each row; tests/kernels counts what autograd holds.
        return sum(work.residual * work.model.size(norm) + 4 for norm in work.model.norms)
    size = sum(4 * work.model.size(norm) for norm in work.model.norms)
    if work.adapter or work.model.layer_norm:  # LayerNorm's backward pass recomputes the normalized input
        return size
    # It has the input's dtype: that of the products for queries and keys, fp32 for the residual stream.
    return size + sum((4 if norm == "hidden" else work.width) * work.model.size(norm) for norm in work.model.norms)


def _attention_bytes(work: Workload, length: int) -> int:
    """Bytes per token and layer. In a packed row, those of the most expensive document, which need not be the
    longest."""
    model, b = work.model, work.width
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    fused = b * (q + k) if model.fused_rotary else 0
    flash = b * (2 * q + 2 * k) + 4 * model.heads
    if work.documents == "matmul" and length <= _SHORT:
        return fused + flash
    joined = b * q if work.documents in ("matmul", "sdpa") else 0  # the row of all documents' outputs
    if work.attention.expected.value not in ("eager", "math"):
        return fused + flash + joined
    # Probabilities in fp32 and, under autocast, once more in 16 bits.
    scores = 4 + (b if work.autocast else 0)
    scores += b if model.without_sdpa else 0  # soft-capped: the cap keeps them too
    scores += 2 * b if model.attention_dropout else 0  # the mask and the result
    return fused + scores * model.heads * length + b * 4 * q


def _inputs(modules: Sequence[ModuleFact]) -> int:
    return sum(module.linear[0] for module in modules if module.linear)


def _adapted(work: Workload) -> list[tuple[int, int]]:
    """(inputs, outputs) of the adapted linear layers, over all decoder layers."""
    names = set(work.adapter.targets.value) if work.adapter else set()
    return [module.linear for module in work.model.modules if module.linear and module.name in names]


def adapter_copies(work: Workload) -> int:
    """Bytes of A and s B in the compute dtype, which surefoot's adapter kernel makes once per step."""
    if work.adapter is None or not work.fast_adapter:
        return 0
    return work.width * work.adapter.rank * sum(inputs + outputs for inputs, outputs in _adapted(work))


def _adapted_inputs(work: Workload) -> int:
    return sum(inputs for inputs, _ in _adapted(work)) // work.model.layers


def _adapter_token_bytes(work: Workload) -> int:
    """Bytes per token: A x of each target; dropout's mask and output; copies of outputs for DoRA (PEFT's two, or
    ours)."""
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
    """Outputs per token and layer that surefoot's DoRA kernel keeps and nothing else does. Without bias and dropout it
    keeps the output itself, which attention (values) and the MLP keep anyway."""
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
    """PEFT computes B A with an identity matrix of every target's input size, and keeps it.

    With dropout it multiplies by the base weight twice, the second time with a cast copy.
    """
    if work.adapter is None or work.adapter.kind.value != "dora" or work.fast_adapter:
        return 0
    copied = work.autocast and work.adapter.dropout > 0
    numbers = sum(inputs * inputs + copied * inputs * outputs for inputs, outputs in _adapted(work))
    return work.width * numbers // work.model.layers


# Reserved for what is not counted: 10 % for fragmentation, and the libraries (CPU) or the CUDA context and workspaces.
_HEADROOM = 0.9
_LIBRARIES = GIB
# `surefoot.models.fast.last_block.WORTH_IT`: if a larger fraction of rows is needed, none is skipped.
_WORTH_IT = 0.9
# Bytes of a packed matrix per weight and per row. NF4: half a byte, one byte of scale per 64 weights, an fp32 scale per
# 256 of these. int8: one byte, and an fp32 scale per row.
_PACKED: dict[PackedType, tuple[float, int]] = {"nf4": (0.5 + 1 / 64 + 4 / (64 * 256), 0), "int8": (1, 4)}
# Cached oneDNN primitives for 16-bit products, 0.6 MiB each, of which a CPU run keeps 256
# (`process.bound_product_caches`). If micro-batches vary in their number of tokens, the cache fills up soon. Those of
# steps of one size are part of what `_HOLES` says is left behind.
_PLACES = 256
_PROGRAMS = 154 << 20  # bytes of all
# How many times as much as its largest gradient a mixture's layer has to keep, see `forecast`. Measured: 2.8 times is
# not enough, 3.9 times is (docs/evidence/memory.md).
_ROOMY = 3
# Gradients inside the layer that runs backward, as a fraction of what the layer keeps.
_BACKWARD = 0.5


@dataclass(frozen=True)
class _Holes:
    """Heap memory that a CPU run with glibc takes besides live tensors, see `surefoot.system.allocator`.

    left: bytes left behind by set-up, interpreter and products.
    of_layer: multiple of what one layer keeps. Each layer requests the same sizes in forward, recomputation and
        backward, and cannot reuse all holes of the previous one.
    of_kept: multiple of all activations, between which there are holes until the backward pass.

    The logits of a chunk reuse the memory of the previous one. Blocks of `LARGE` bytes are mapped and leave no holes.
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
    """Forecast the peak for micro-batches of `examples` examples padded to `length` tokens.

    supervised: fraction of the tokens that carry loss.
    recomputed: see `MemoryPlan`.
    accumulation: forward passes per step; only whether there is more than one matters.
    """
    tokens = examples * work.rows * length
    layers = work.model.layers
    per_layer = work.passes * layer_bytes(work, tokens, length)
    again = (layers if recomputed is None else min(recomputed, layers)) if checkpointing.value else 0
    # A checkpointed layer keeps its input. The first layers are checkpointed: they run backward last, so that one
    # layer's activations at a time are recomputed into memory that the others have freed.
    kept = work.passes * again * tokens * work.model.states * work.model.hidden * BYTES[work.precision.unpacked]
    positions = int(tokens * supervised)
    # The last layer is checkpointed last; if it is, nothing is subtracted, because other layers need as much.
    unread = tokens - positions if work.prunes and again < layers and positions <= _WORTH_IT * tokens else 0
    less = work.passes * unread_bytes(work, unread)
    # The backward pass reaches the vision tower last. Its layers are checkpointed if any decoder layer is.
    pictures = examples * work.rows * (work.pictures.recomputed if again else work.pictures.once)
    forward = pictures + kept + (layers - again) * per_layer - less
    # The last layer runs backward first, when all activations exist. Rows that it leaves out have no gradients either.
    # When the layer before it has gradients of all rows, the last one's activations are freed.
    last = max(layers - again, 1) * per_layer - less + int(_BACKWARD * (per_layer - less))
    before = int((max(layers - again - 1, 1) + _BACKWARD) * per_layer) if layers > 1 else 0
    activations = pictures + kept + max(last, before)
    logits = _logits(work, positions)
    elsewhere = work.offloaded and work.kind != "cpu"  # a CPU has one memory
    host_ahead = work.ahead if work.kind == "cuda" else 0
    trained, narrowed = work.trainable + work.learning, work.narrow / work.trainable if work.trainable else 0.0
    weights = _frozen_bytes(work) + 4 * work.trainable + _cast_bytes(work) + adapter_copies(work)
    weights -= work.narrow * (4 - work.width)
    learning = 4 + (work.width if work.autocast else 0) - 4 * narrowed  # of a weight of the second model
    masters = 4 * trained if work.offloaded else 0
    # Offloaded, the largest is on its way to the host while the next one is made. A tied head's waits for that of the
    # embedding.
    waits = (1 + work.model.tied) * work.largest if elsewhere else 0
    gradients = work.largest + waits if elsewhere else 4 * trained
    # The gradient of a layer's experts is one block. Holes that a freed layer leaves have room for it only if the layer
    # keeps several times as much.
    apart = work.holes != "none" and work.adapter is None and _ROOMY * largest_gradient(work.model) > per_layer
    waiting = gradients if (accumulation > 1 or apart) and not elsewhere else 0
    peak = max(
        waiting + forward + logits,
        waiting + activations + waits,
        gradients - _cast_bytes(work) + pictures + int((1 + _BACKWARD) * per_layer),
    )
    return MemoryPlan(
        weights=weights + work.under + int(work.learning * learning) + (masters if not elsewhere else 0),
        gradients=gradients,
        optimizer=0 if elsewhere else work.optimizer,
        activations=activations,
        logits=logits,
        available=available,
        gradient_checkpointing=checkpointing,
        beside=work.beside,
        cast=_cast_bytes(work),
        recomputed=again if again and again < layers else None,
        apart=gradients + activations + logits - peak,
        holes=_holes(work, activations, per_layer, tokens) + _programs(work),
        ahead=work.ahead - host_ahead,
        # Beside masters, sums and moments, copies in both directions are under way.
        host=host_ahead + (masters + 4 * trained + work.optimizer + 3 * work.largest if elsewhere else 0),
        host_ahead=host_ahead,
    )


def _holes(work: Workload, activations: int, layer: int, tokens: int) -> int:
    model, b, holes = work.model, work.width, _HOLES[work.holes]
    share = 1.0  # fraction of a layer in blocks from the heap
    if tokens * model.hidden * b >= LARGE:
        share = 0.0
    elif tokens * model.intermediate * b >= LARGE:
        mlp = tokens * b * mlp_tensors(work) * model.intermediate
        share = max(0.0, 1 - work.passes * mlp / layer)
    return holes.left + int(share * (holes.of_layer * layer + holes.of_kept * activations))


def _programs(work: Workload) -> int:
    # The rows of every expert vary from pass to pass; experts of an fp32 base compute in fp32.
    varies = work.varies or (work.model.experts > 0 and work.adapter is not None and work.precision.unpacked != "fp32")
    if work.holes == "none" or work.kind != "cpu" or not work.autocast:
        return 0
    return _PROGRAMS if varies else _PROGRAMS * min(work.products, _PLACES) // _PLACES


def usable(available: int) -> int:
    """Bytes of available memory that a forecast may use."""
    return max(0, int(_HEADROOM * available) - _LIBRARIES)


def fits(memory: MemoryPlan) -> bool:
    return memory.total <= usable(memory.available)


def fits_host(memory: MemoryPlan) -> bool:
    """Whether what lies in host memory fits there; true if it is unknown how much the host has."""
    return not memory.host or memory.host_available is None or memory.host <= usable(memory.host_available)


def base_bytes(work: Workload) -> int:
    """Bytes of another frozen copy of the base, stored like this one."""
    return 4 * work.parameters if work.adapter is None else _frozen_bytes(work)


def _cast_bytes(work: Workload) -> int:
    """Bytes of cast weights: autocast keeps a cast copy of every fp32 weight of a product until its backward pass is
    over. Those of surefoot's adapter kernel stay, see `adapter_copies`."""
    if not work.autocast:
        return 0
    linear = sum(module.parameters for module in work.model.modules if module.linear) - work.narrow
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
    quantized = int(of_weight * sum(matrices)) + of_row * sum(outputs for _, outputs in linears)
    # One matrix at a time is dequantized for its product.
    return quantized + rest + max(matrices) * work.width


def _logits(work: Workload, positions: int) -> int:
    """Bytes at the end of the forward pass. With the chunked loss: logits in the compute dtype, overwritten by their
    gradient, with 16 bits their fp32 softmax, and with a cap its fp32 tanh; a trained head also gets its gradient
    there, summed in fp32, and under autocast the product of a chunk."""
    if not work.logits:
        return 0
    vocab, cast = work.model.vocab, work.width if work.autocast else 0
    compared = min(positions, work.loss_rows or COMPARED_AT_ONCE) * vocab * 4 * work.compared
    compared += positions * vocab * (cast or 4) if work.other_logits else 0
    if work.loss_rows is None:  # logits, their fp32 copy, the log-softmax, and the gradients of both
        return positions * vocab * (2 + 4 + 4 + 4 + 2 if work.autocast else 4 + 4 + 4) + compared
    head = vocab * work.model.hidden * (4 + cast) if work.adapter is None else 0
    capped = 4 if work.model.logit_cap else 0
    return min(positions, work.loss_rows) * vocab * (4 + cast + capped) + head + compared
