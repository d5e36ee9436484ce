"""How much memory the run needs, by kind, from the shape of the model alone.

The counts follow what autograd keeps alive in transformers' decoder layers with PEFT's adapters (a test compares them
with the saved tensors themselves). Not counted: the libraries, an accelerator's cache, other programs; hence the
headroom.

Not everything is there at once. The peak is at the end of the forward pass, with logits; or as the first layer goes
backward, without; or at the end of the backward pass, when gradients have come as activations and cast copies went. In
a step of several passes the gradients of the first wait through the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.planning.layer_memory import adapter_copies, layer_bytes, mlp_tensors, unread_bytes
from surefoot.planning.plan import Choice, MemoryPlan
from surefoot.planning.workload import BYTES, Workload
from surefoot.system.allocator import LARGE, Holes
from surefoot.system.messages import GIB

# Left for what is not counted: 10 % for fragmentation, and the libraries (CPU) or the CUDA context with its workspaces.
_HEADROOM = 0.9
_LIBRARIES = GIB
# `surefoot.models.fast.last_block.WORTH_IT`: where a larger share of all rows is read, none is left out.
_WORTH_IT = 0.9
# NF4: half a byte, a byte of scale for 64 weights, an fp32 scale for 256 of these.
_PACKED = 0.5 + 1 / 64 + 4 / (64 * 256)
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
    recomputed: see `MemoryPlan`. accumulation: forward passes of a step; what is more than one makes no difference."""
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
    gradients = 4 * (work.trainable + work.learning)
    waiting = gradients if accumulation > 1 else 0
    peak = max(
        waiting + forward + logits,
        waiting + activations,
        gradients - _cast_bytes(work) + int((1 + _BACKWARD) * per_layer),
    )
    return MemoryPlan(
        weights=_weight_bytes(work) + work.under + work.learning * (4 + (work.width if work.autocast else 0)),
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
    counted = work.holes != "none" and work.kind == "cpu" and work.autocast and work.varies
    return _PROGRAMS if counted else 0


def usable(available: int) -> int:
    """Bytes that a forecast may fill."""
    return int(_HEADROOM * available) - _LIBRARIES


def fits(memory: MemoryPlan) -> bool:
    return memory.total <= usable(memory.available)


def base_bytes(work: Workload) -> int:
    """Of another copy of the base, frozen and held as this one is."""
    return 4 * work.parameters if work.adapter is None else _frozen_bytes(work)


def _weight_bytes(work: Workload) -> int:
    return _frozen_bytes(work) + 4 * work.trainable + _cast_bytes(work) + adapter_copies(work)


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
    if work.precision.base.value != "nf4":
        return work.parameters * BYTES[work.precision.unpacked]
    linears = [module.linear for module in work.model.modules if module.in_layer and module.linear]
    matrices = [inputs * outputs for inputs, outputs in linears]
    rest = (work.parameters - sum(matrices)) * BYTES[work.precision.unpacked]
    # One matrix at a time is dequantised for its product.
    return int(_PACKED * sum(matrices)) + rest + max(matrices) * work.width


def _logits(work: Workload, positions: int) -> int:
    """At the end of the forward pass. In pieces: logits in the type of the products, whose place their gradient takes,
    and in 16 bits their softmax in fp32; a head that trains gets its gradient there and then, summed in fp32, and under
    autocast the product of a piece besides."""
    if not work.logits:
        return 0
    head = work.model.vocab * work.model.hidden * (4 + (work.width if work.autocast else 0))
    held = work.loss_rows is not None and work.adapter is None
    return _logits_at_once(work, positions) + (head if held else 0)


def _logits_at_once(work: Workload, positions: int) -> int:
    if work.loss_rows is None:
        return positions * work.model.vocab * _logit_bytes(work)
    return min(positions, work.loss_rows) * work.model.vocab * (4 + work.width if work.autocast else 4)


def _logit_bytes(work: Workload) -> int:
    """Logits as computed, in fp32, their log-softmax, and the gradients of both ends."""
    return 4 + 4 + 4 if not work.autocast else 2 + 4 + 4 + 4 + 2
