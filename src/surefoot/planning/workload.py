"""The workload: everything besides the number of tokens that determines a run's memory (models, dtypes, kernels)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.experts import as_dense
from surefoot.planning.fast_paths import EXPERTS, FUSED, head_rows
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.optimizer import state_bytes, trainable_tensors
from surefoot.planning.plan import (
    PLAIN,
    ZERO,
    AdapterPlan,
    AttentionPlan,
    DType,
    KernelsPlan,
    PrecisionPlan,
    TokenizerPlan,
)
from surefoot.planning.trained import idle_parameters, only_trained
from surefoot.planning.vision import NOTHING, Kept, TrainedVision, picture_bytes
from surefoot.system.allocator import Holes
from surefoot.system.hardware import Hardware

BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Workload:
    """What determines the memory besides the number of tokens.

    model: a mixture of experts as in `experts.as_dense`.
    """

    model: ModelFacts
    precision: PrecisionPlan
    attention: AttentionPlan
    adapter: AdapterPlan | None
    trainable: int
    parameters: int  # with added rows
    optimizer: int  # bytes of optimizer state
    rows: int = 1  # rows per example: a pair of answers is two
    logits: bool = True  # whether logits are computed
    beside: int = 0  # bytes of frozen models besides the trained one
    learning: int = 0  # parameters of a second trained model
    under: int = 0  # bytes of that model's frozen base, if it is not the policy's
    fast_adapter: bool = False  # whether surefoot's adapter kernel is used
    fast_experts: bool = False  # whether its kernel for adapters on experts is used
    loss_rows: int | None = None  # positions whose logits exist at once; None: all of them
    documents: str = PLAIN  # the form of attention over packed rows; plain: rows are padded
    passes: int = 1  # forward passes whose activations exist at once: two for actor and critic
    fused_norms: bool = False  # whether surefoot's norm kernel is used, which keeps less
    fused_gates: bool = False  # the same for the gated activation
    prunes: bool = False  # whether the last layer computes only needed rows after its attention
    offloaded: bool = False  # whether one process has its optimizer in host memory
    narrow: int = 0  # trained weights that are then held in the compute dtype on the device
    largest: int = 0  # bytes of the largest gradient, if offloaded
    varies: bool = False  # whether micro-batches vary in their number of tokens
    products: int = 0  # shapes of products before step 1 and in the vision tower; 0 while the data are unknown
    kind: str = "cuda"  # device kind: cpu | cuda | mps
    compared: int = 0  # fp32 numbers for each logit of a chunk, besides its own, for a teacher's logits or entropies
    other_logits: bool = False  # whether the other model's logits of all positions exist at once
    ahead: int = 0  # bytes that drawing in advance keeps in host memory
    answer: int = 0  # bytes that drawing an answer takes; 0: this process draws none
    answers: int | None = None  # that are drawn before an update, over all ranks; None: unknown
    holes: Holes = "none"  # heap fragmentation of the C library
    pictures: Kept = NOTHING  # by the images of a row, until the backward pass has left the vision tower

    @property
    def width(self) -> int:
        """Bytes per element of the compute dtype."""
        return BYTES[self.precision.compute.value]

    @property
    def residual(self) -> int:
        """Bytes per element of what goes from layer to layer: embeddings are not cast."""
        return BYTES[self.precision.unpacked] if self.adapter else BYTES["fp32"]

    @property
    def autocast(self) -> bool:
        return self.precision.compute.value != "fp32"


def workload_of(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    tokens: TokenizerPlan,
    precision: PrecisionPlan,
    attention: AttentionPlan,
    adapter: AdapterPlan | None,
    documents: str,
    lengths: LengthFacts | None,
    vision: TrainedVision,
) -> Workload:
    """Workload of the trained model with the libraries' code. documents: see `Workload`."""
    added = tokens.added_rows * model.embedding_width * (1 if model.tied else 2)
    parameters = model.parameters + model.wrapper_parameters + added
    language = parameters - model.wrapper_parameters - idle_parameters(config, model, tokens)
    trainable = adapter.trainable if adapter else language + vision.parameters
    tensors = trainable_tensors(only_trained(config, model), adapter, tokens.added_rows)
    moments = state_bytes(config.optim, chain(tensors, vision.tensors))
    started = adapter is not None and adapter.start != ZERO and hardware.kind == "cpu"
    return Workload(
        as_dense(model),
        precision,
        attention,
        adapter,
        trainable,
        parameters,
        moments,
        rows=config.method.rows,
        logits=not config.method.scores,
        beside=4 * trainable if started else 0,  # the adapter's first values, in host memory
        documents=documents,
        varies=documents != PLAIN or (lengths is not None and len(set(lengths.mix)) > 1),
        products=_products(model, adapter, vision, lengths),
        kind=hardware.kind,
        holes=hardware.holes,
        pictures=_pictures(model, vision, lengths, BYTES[precision.compute.value]),
    )


def _pictures(model: ModelFacts, vision: TrainedVision, lengths: LengthFacts | None, width: int) -> Kept:
    if lengths is None:
        return NOTHING
    return picture_bytes(model, (*vision.parts, *vision.adapted), lengths.features, lengths.longest, width)


# Products of other sizes for each shape of a decoder layer's matrix in the comparison of fast paths before step 1, with
# an adapter (plain and fast A, B and their gradients) and without; and for each of a tower, frozen and trained. Counted
# by oneDNN itself (docs/evidence/memory.md, Pictures).
_COMPARED = {True: 26, False: 8}
_SEEN = {False: 4, True: 9}


def _products(
    model: ModelFacts, adapter: AdapterPlan | None, vision: TrainedVision, lengths: LengthFacts | None
) -> int:
    if lengths is None:
        return 0
    count = _COMPARED[adapter is not None] * len({one.linear for one in model.layer_linears if one.linear})
    if lengths.pictures:
        count += _SEEN[bool(vision.parts or vision.adapted)] * len(
            {shape for _, shape in model.vision if len(shape) == 2}
        )
    return count


def with_kernels(work: Workload, kernels: KernelsPlan, config: RunConfig) -> Workload:
    """Return the workload with surefoot's kernels."""
    chunked = kernels.loss.value == "chunked"
    drawn = 1 if chunked and config.method.rollouts else 0  # beside log-probabilities, for the entropy
    return replace(
        work,
        fast_adapter=kernels.adapter.value == "fast",
        fast_experts=kernels.adapter.value in ("fast", EXPERTS),
        fused_norms=kernels.pointwise.value == FUSED,
        fused_gates=kernels.gated.value == FUSED,
        prunes=kernels.last_block.value == "pruned" and not config.method.critic,  # whose values need all rows
        compared=work.compared + drawn,
        # A loss of tokens computes its reference's head as it does the model's own.
        other_logits=work.other_logits or (bool(work.compared) and config.needs_reference and not chunked),
        # An unknown family may change its logits: reserve memory for all of them.
        loss_rows=head_rows(trains=work.adapter is None) if chunked and work.model.family else None,
    )
