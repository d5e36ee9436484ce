"""What decides the memory of a run besides the number of tokens in flight: its models, its types, its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.expert_memory import as_dense
from surefoot.planning.fast_paths import FUSED, head_rows
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.optimizer import state_bytes, trainable_tensors
from surefoot.planning.plan import PLAIN, AdapterPlan, AttentionPlan, DType, KernelsPlan, PrecisionPlan, TokenizerPlan
from surefoot.planning.reward import idle_parameters, without_idle
from surefoot.planning.vision import Sight
from surefoot.system.allocator import Holes
from surefoot.system.hardware import Hardware

BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Workload:
    """What decides the memory besides the number of tokens in flight.

    model: of a mixture of experts as `expert_memory.as_dense` has it.
    """

    model: ModelFacts
    precision: PrecisionPlan
    attention: AttentionPlan
    adapter: AdapterPlan | None
    trainable: int
    parameters: int  # with added rows
    optimizer: int  # bytes of its state
    rows: int = 1  # that an example goes through the model as: a pair of answers is two
    logits: bool = True  # whether any are computed
    beside: int = 0  # bytes of frozen models beside the one that trains
    learning: int = 0  # parameters of a model beside it that trains as well
    under: int = 0  # bytes of the frozen base under those, where it is not the policy's
    fast_adapter: bool = False  # LoRA and DoRA by arithmetic of our own
    loss_rows: int | None = None  # positions whose logits exist at once; None: all of them
    documents: str = PLAIN  # the form of attention over packed rows; plain: rows are padded
    passes: int = 1  # forward passes whose activations are alive at once: an actor's and a critic's are two
    fused_norms: bool = False  # norms by arithmetic of our own, which keeps less
    prunes: bool = False  # behind its attention, the last layer computes rows that are read and no others
    varies: bool = False  # whether micro-batches have other numbers of tokens from step to step
    kind: str = "cuda"  # of device: cpu | cuda | mps
    holes: Holes = "none"  # that the C library leaves in memory

    @property
    def width(self) -> int:
        """Bytes of a number that products read and write."""
        return BYTES[self.precision.compute.value]

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
    sight: Sight,
) -> Workload:
    """Of the model that trains, by the libraries' own arithmetic. documents: see `Workload`."""
    added = tokens.added_rows * model.embedding_width * (1 if model.tied else 2)
    parameters = model.parameters + model.wrapper_parameters + added
    language = parameters - model.wrapper_parameters - idle_parameters(config, model, tokens)
    trainable = adapter.trainable if adapter else language + sight.parameters
    tensors = trainable_tensors(without_idle(config, model), adapter, tokens.added_rows)
    moments = state_bytes(config.optim, chain(tensors, sight.tensors))
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
        documents=documents,
        varies=documents != PLAIN or (lengths is not None and len(set(lengths.mix)) > 1),
        kind=hardware.kind,
        holes=hardware.holes,
    )


def with_kernels(work: Workload, kernels: KernelsPlan, config: RunConfig) -> Workload:
    """As surefoot's own arithmetic has it."""
    chunked = kernels.loss.value == "chunked"
    return replace(
        work,
        fast_adapter=kernels.adapter.value == "fast",
        fused_norms=kernels.pointwise.value == FUSED,
        prunes=kernels.last_block.value == "pruned" and not config.method.critic,  # which reads all rows
        # What an unknown family does to its logits, only the model shows: room is kept for all of them.
        loss_rows=head_rows(trains=work.adapter is None) if chunked and work.model.family else None,
    )
