"""Handwritten plans, for tests of the code that carries plans out."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from surefoot.planning.plan import (
    AdapterPlan,
    AttentionPlan,
    BatchPlan,
    Choice,
    DType,
    MemoryPlan,
    PrecisionPlan,
    RunPlan,
    SdpaKernel,
    TokenizerPlan,
)


def choice(value: Any) -> Choice[Any]:
    return Choice(value, "for this test", "user")


def linear_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all linear layers except the output head."""
    return tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")


def adapter_plan(
    targets: Sequence[str],
    kind: str = "lora",
    *,
    rank: int = 4,
    alpha: float = 8.0,
    dropout: float = 0.0,
    rslora: bool = False,
    modules_to_save: tuple[str, ...] = (),
    trainable: int = 0,
) -> AdapterPlan:
    return AdapterPlan(
        choice(kind), rank, alpha, dropout, rslora, choice(tuple(targets)), modules_to_save, trainable=trainable
    )


def precision_plan(compute: DType = "fp32", base: DType = "fp32", tf32: bool = False) -> PrecisionPlan:
    return PrecisionPlan(choice(compute), choice(base), choice("fp32"), choice(compute == "fp16"), choice(tf32))


def attention_plan(
    implementation: str = "sdpa", kernels: tuple[SdpaKernel, ...] = ("flash", "math"), expected: str = "flash"
) -> AttentionPlan:
    return AttentionPlan(choice(implementation), choice(kernels), choice(expected))


def run_plan(
    *,
    trainable: int,
    parameters: int,
    precision: PrecisionPlan | None = None,
    attention: AttentionPlan | None = None,
    adapter: AdapterPlan | None = None,
    gradient_checkpointing: bool = False,
) -> RunPlan:
    return RunPlan(
        device=choice("cpu"),
        precision=precision or precision_plan(),
        attention=attention or attention_plan(),
        tokenizer=TokenizerPlan(
            choice("<|end_of_text|>"), 321, 0, choice(True), 320, choice((321,)), choice("llama3"), choice(128)
        ),
        adapter=adapter,
        memory=MemoryPlan(0, 0, 0, 0, 0, 1, choice(gradient_checkpointing)),
        batch=BatchPlan(choice(4), choice(4), 1),
        compile=choice("off"),
        threads=choice(2),
        trainable=trainable,
        parameters=parameters,
        environment=(),
        cautions=(),
        measurements={},
        optimizer=choice("adamw"),
    )
