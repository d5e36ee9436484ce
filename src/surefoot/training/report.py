"""Read-only reports of one optimizer step and one evaluation, for logs, progress and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from surefoot.method_facts.methods import Unit
from surefoot.system.messages import first_few

if TYPE_CHECKING:  # torch is not needed to read a log
    from surefoot.data.batching.batch import RecordName

_NAMED = 8  # examples listed in a message
Decision = Literal["stepped", "non_finite", "scaler", "held"]
Load = Mapping[str, tuple[int, ...]]  # layer -> tokens sent to each of its experts


@dataclass(frozen=True)
class StepProfile:
    """Times of a step.

    forward_ms, backward_ms: milliseconds per micro-batch, averaged over the step.
    tokens_per_second: input tokens without padding / time of forward and backward passes; None if that time is 0.
    data_ms: milliseconds until the step's batches were ready.
    optimizer_ms: milliseconds from the last backward pass to the updated weights.
    """

    forward_ms: float
    backward_ms: float
    micro_batches: int
    tokens_per_second: float | None
    data_ms: float = 0.0
    optimizer_ms: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """Report of one optimizer step.

    step: step number, from 1.
    loss: mean over the step's weight; None if not finite or the weight is 0.
    grad_norm: norm over all parameters before clipping; None if not finite or the weight is 0.
    lr: learning rate of the first parameter group.
    weight, tokens: loss weight and input tokens without padding, over all ranks.
    examples: this rank's examples.
    decision: "stepped", or why the optimizer did not step; "held": a bound of the method was exceeded, or weight 0.
    held: short reason if the decision is "held".
    seconds: duration of the step, without evaluation and saving.
    profile: times of its parts, if the step was timed.
    metrics: further metrics by name.
    spike: norm to which the gradient was clipped because it was far above those of the steps before.
    moment: name of an optimizer moment that was not finite before the step.
    traced: whether torch's profiler recorded the step, which slows it down.
    load: MoE layer -> tokens sent to each expert.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    weight: int
    tokens: int
    examples: tuple[RecordName, ...]
    decision: Decision
    non_finite: str | None  # "loss" | "grad_norm" | "moment"
    seconds: float
    scale: float | None = None  # gradient scale, fp16 only
    profile: StepProfile | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: str = ""
    spike: float | None = None
    moment: str = ""
    traced: bool = False
    load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """Report of an evaluation after `step` optimizer steps; means over the evaluation set.

    perplexity: exp(loss); None if the loss is not a cross entropy over tokens.
    accuracy: share of supervised tokens predicted correctly; None if the objective does not count them.
    metrics: metrics of generated answers (higher is better) and further sums of the objective, by name.
    seconds: duration of the evaluation.
    tables: tables of the objective, summed over the set.
    unit: what `weight` counts.
    """

    step: int
    loss: float
    perplexity: float | None
    accuracy: float | None
    weight: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    unit: Unit = "tokens"


def example_list(examples: tuple[RecordName, ...]) -> str:
    return first_few(examples, _NAMED)


def added_loads(first: Load, second: Load) -> dict[str, tuple[int, ...]]:
    """Add the expert loads of two parts of a run."""
    names = dict.fromkeys((*first, *second))
    pairs = {name: (first.get(name) or (), second.get(name) or ()) for name in names}
    return {
        name: tuple(a + b for a, b in zip(one, other, strict=True)) if one and other else tuple(one or other)
        for name, (one, other) in pairs.items()
    }
