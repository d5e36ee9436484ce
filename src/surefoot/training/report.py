"""What one optimizer step did: a read-only record for logs, progress and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from surefoot.method_facts.methods import Unit
from surefoot.system.messages import first_few

if TYPE_CHECKING:  # torch is not needed to read a log
    from surefoot.data.batching.batch import RecordName

_NAMED = 8  # examples in a sentence
Decision = Literal["stepped", "non_finite", "scaler", "held"]
Load = Mapping[str, tuple[int, ...]]  # layer -> how many tokens went to each of its experts


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step went.

    forward_ms, backward_ms: milliseconds per micro-batch, mean over the step's.
    tokens_per_second: real input tokens of the step over the time of its forward and backward passes; None where the
        clock saw none.
    data_ms: until its batches were there.
    optimizer_ms: from the last backward pass to weights that have moved; of the whole step.
    """

    forward_ms: float
    backward_ms: float
    micro_batches: int
    tokens_per_second: float | None
    data_ms: float = 0.0
    optimizer_ms: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """step counts from 1.

    loss: mean over the step's weight, None when non-finite.
    grad_norm: before clipping, over all parameters.
    lr: of the first group of parameters.
    weight, tokens: of all ranks.
    examples: of this one.
    decision: "stepped", or why the optimizer did not move; "held": the stage held it back; without weight it
        has neither loss nor norm.
    held: why it was, in a few words.
    seconds: the step alone, without evaluation or saving.
    profile: only of a step that was watched.
    metrics: what else the stage has to say of the step, by name.
    spike: the norm that the gradient was cut to because it was far above those of the steps before.
    moment: which one of the optimizer was not finite before the step.
    traced: a profiler recorded it, which takes time.
    load: of a mixture's layers, how many tokens went to each expert.
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
    """Means over the evaluation set, after `step` optimizer steps.

    perplexity: exp(loss), None where the loss is no cross entropy of tokens.
    accuracy: share of supervised tokens, None where the objective does not count them.
    metrics: by name, of generated answers (there higher is better) and whatever else the objective sums up.
    seconds: all of it.
    tables: sums of more than one number, as the objective made them.
    unit: of weight.
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
    """The loads of two stretches of a run together."""
    names = dict.fromkeys((*first, *second))
    pairs = {name: (first.get(name) or (), second.get(name) or ()) for name in names}
    return {
        name: tuple(a + b for a, b in zip(one, other, strict=True)) if one and other else tuple(one or other)
        for name, (one, other) in pairs.items()
    }
