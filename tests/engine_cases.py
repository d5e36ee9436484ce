"""Three steps of a tiny Llama under any engine, on one rank or on two: what tests of engines compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.data.batch import Batch, Example, collate
from surefoot.data.loader import dealt
from surefoot.models.peft import LoraConfig, TaskType, get_peft_model
from surefoot.objectives.sft import sft_loss
from surefoot.training.engine import ALL, Engine, EngineChoice, Groups, make_engine
from surefoot.training.engine.base import Members
from surefoot.training.optimizer import OptimizerSettings, make_optimizers
from surefoot.training.ranks import ALONE, Ranks
from surefoot.training.report import StepReport
from surefoot.training.step import StepSettings, train_step
from toy import settings

VOCABULARY = 61
STEPS = 3
RATE = 1e-3
SINGLE = EngineChoice("single")
ENGINES = {
    "ddp": EngineChoice("ddp"),
    "fsdp2": EngineChoice("fsdp2"),
    "zero1": EngineChoice("deepspeed", 1),
    "zero2": EngineChoice("deepspeed", 2),
    "zero3": EngineChoice("deepspeed", 3),
}
KINDS = ("lora", "dora", "full")
ONE: Members = {ALL: lambda name: True}


def tiny(kind: str, *, dropout: float = 0.0, tied: bool = False, base: torch.dtype = torch.float32) -> nn.Module:
    """kind: lora | dora | full. Adapters start away from zero, so that every parameter has a gradient that counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(base)
    if kind == "full":
        return model.train()
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=dropout,
            target_modules="all-linear",
            use_dora=kind == "dora",
            init_lora_weights=False,
            task_type=TaskType.CAUSAL_LM,
        ),
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.train()


def micro_batches(step: int, count: int) -> list[Batch]:
    """Of all ranks: `count` micro-batches of two examples each."""
    draw = np.random.default_rng(step)
    batches = []
    for number in range(count):
        rows = []
        for row in range(2):
            length = int(draw.integers(4, 10))
            supervised = draw.random(length) < 0.7
            supervised[-1] = True
            rows.append(Example(draw.integers(0, VOCABULARY, length), supervised, 10 * number + row))
        batches.append(collate(rows, pad_id=0))
    return batches


@dataclass(frozen=True)
class Case:
    """counts: micro-batches of each step, over all ranks. limits: clipping, by group or of all."""

    kind: str = "lora"
    dropout: float = 0.0
    tied: bool = False
    base: torch.dtype = torch.float32
    counts: tuple[int, ...] = (4, 3, 2)
    limits: Any = 0.5
    rates: Any = RATE
    members: str = "one"  # one | two
    optimizer: str = "adamw"
    checkpointing: bool = False


MEMBERS: dict[str, Members] = {
    "one": ONE,
    "two": {"actor": lambda name: "layers.0" in name, "critic": lambda name: "layers.0" not in name},
}


def engine_for(case: Case, choice: EngineChoice, ranks: Ranks) -> Engine:
    model = tiny(case.kind, dropout=case.dropout, tied=case.tied, base=case.base)
    if case.checkpointing:
        from surefoot.models.checkpointing import enable_gradient_checkpointing

        enable_gradient_checkpointing(model)

    def make(groups: Groups):
        chosen = OptimizerSettings(case.optimizer, (0.9, 0.99), 0.9 if case.optimizer == "sgd" else None, 1e-8, 0.01)  # pyright: ignore[reportArgumentType]
        return make_optimizers(groups, dict.fromkeys(groups, chosen), decoder=frozenset())

    return make_engine(choice, model, MEMBERS[case.members], make, ranks, torch.device("cpu"))


def steps(engine: Engine, case: Case, ranks: Ranks, first: int = 1, objective: Callable = sft_loss) -> list[StepReport]:
    plain = settings(seed=5)
    chosen = StepSettings(plain.seed, case.limits, plain.forward, plain.kernels)
    return [
        train_step(
            engine,
            objective,
            list(dealt(micro_batches(step, count), ranks.rank, ranks.world)),
            step=step,
            lr=case.rates,
            scale=None,
            settings=chosen,
        )
        for step, count in enumerate(case.counts, first)
    ]


def snapshot(engine: Engine) -> dict[str, np.ndarray]:
    """Whole weights and moments; empty on all ranks but the first."""
    moments = engine.gather_state()
    with engine.gathered():
        if engine.rank:
            return {}
        weights = dict(engine.model.named_parameters())
        return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in {**weights, **moments}.items()}


def trained(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    engine = engine_for(case, choice, ranks)
    reports = steps(engine, case, ranks)
    return {
        "state": snapshot(engine),
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "decisions": [report.decision for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "elements": engine.elements(),
        "whole": sum(parameter.numel() for parameter in tiny(case.kind, tied=case.tied).parameters()),
    }


def alone(case: Case) -> dict[str, Any]:
    return trained(ALONE, case, SINGLE)
