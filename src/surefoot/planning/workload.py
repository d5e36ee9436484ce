"""From the choices of a plan to what its forecast of memory counts."""

from __future__ import annotations

from dataclasses import replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.hardware import Hardware
from surefoot.planning.fast_paths import head_rows
from surefoot.planning.memory import Workload
from surefoot.planning.optimizer import state_bytes, trainable_tensors
from surefoot.planning.plan import AdapterPlan, AttentionPlan, KernelsPlan, PrecisionPlan, TokenizerPlan
from surefoot.planning.pointwise import FUSED, gate_width
from surefoot.planning.reward import idle_parameters, without_idle

_ROWS = {"reward": 2, "dpo": 2, "kto": 2}  # that an example goes through the model as: two answers to one prompt


def workload_of(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    tokens: TokenizerPlan,
    precision: PrecisionPlan,
    attention: AttentionPlan,
    adapter: AdapterPlan | None,
    documents: str,
) -> Workload:
    """Of the language model that trains, by the libraries' own arithmetic. documents: see `Workload`."""
    parameters = model.parameters + tokens.added_rows * model.embedding_width * (1 if model.tied else 2)
    trainable = adapter.trainable if adapter else parameters - idle_parameters(config, model, tokens)
    moments = state_bytes(config.optim, trainable_tensors(without_idle(config, model), adapter, tokens.added_rows))
    return Workload(
        model,
        precision,
        attention,
        adapter,
        trainable,
        parameters,
        moments,
        rows=_ROWS.get(config.stage, 1),
        logits=config.stage != "reward",
        documents=documents,
        kind=hardware.kind,
        holes=hardware.holes,
    )


def with_kernels(work: Workload, kernels: KernelsPlan, config: RunConfig) -> Workload:
    """As surefoot's own arithmetic has it."""
    fused = kernels.pointwise.value == FUSED
    chunked = kernels.loss.value == "chunked"
    return replace(
        work,
        fast_adapter=kernels.adapter.value == "fast",
        fused_norms=fused,
        fused_gates=fused and gate_width(work.model, work.kind) is not None,
        prunes=kernels.last_block.value == "pruned" and config.stage != "ppo",  # whose critic reads all rows
        # What an unknown family does to its logits, only the model shows: room is kept for all of them.
        loss_rows=head_rows(trains=work.adapter is None) if chunked and work.model.family else None,
    )
