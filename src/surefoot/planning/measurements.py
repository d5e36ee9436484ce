"""What the probes saw on this machine, as plain values that go into plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from surefoot.planning.plan import DType

PADDED = "padded"  # a trial of documents in padded rows, which packing is compared with
MEMORY_TAKEN = "as memory was in use"  # why less is timed than will be once others give it back


@dataclass(frozen=True)
class AttentionTrial:
    """One form of attention: eager, or SDPA held to one kernel.

    seconds: best forward and backward pass; 0 where it was not timed.
    failure: why it did not run, or what was wrong with its numbers; empty where it is right.
    errors: the largest relative error by what was compared.
    timed: at what, where that is less than the run's shapes: "at 1024 of 4096 tokens"; empty where it is not.
    untimed: why one of which nothing is known to be wrong could not be timed; empty where it was.
    """

    form: str  # eager | flash | mem_efficient | cudnn | math
    seconds: float
    failure: str
    errors: Mapping[str, float] = field(default_factory=dict)
    timed: str = ""
    untimed: str = ""

    @property
    def trouble(self) -> str:
        """Why it is not among those to choose from; empty where it is."""
        return self.failure or self.untimed

    @property
    def remarks(self) -> str:
        """Why it failed or was timed in part."""
        return f"{self.trouble} {self.timed}"

    @property
    def passed(self) -> bool:
        """Right, and timed."""
        return not self.trouble


def times_of(trials: Sequence[AttentionTrial]) -> str:
    """What those that passed took, and at what, where that is less than the run's shapes."""
    passed = [trial for trial in trials if trial.passed]
    at = {trial.timed for trial in passed}
    common = f", {min(at)}" if len(at) == 1 and min(at) else ""
    own = {one.form: "" if common or not one.timed else f" ({one.timed})" for one in passed}
    times = ", ".join(f"{one.form} {1000 * one.seconds:.3g}{own[one.form]}" for one in passed)
    return f"forward and backward here{common}: {times}"


@dataclass(frozen=True)
class PointwiseSizes:
    """A model's sizes: numbers of its norms, heads of its queries, numbers of each head."""

    width: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class PointwiseTrial:
    """One kind of operators at the model's width, plain and fused.

    part: norm | rotary (gate in plans made before 2026-11-23).
    plain, fused: seconds of the best forward and backward pass; 0 where it was not timed.
    failure, errors: see AttentionTrial.
    """

    part: str
    plain: float
    fused: float
    failure: str
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def remarks(self) -> str:
        return self.failure


@dataclass(frozen=True)
class Measurements:
    """What the probes measured on this machine.

    products: FLOP/s of matrix products at the model's shapes, by dtype; empty where nobody measured.
    attention: one trial per form at `attention_length` tokens in `attention_dtype`; empty where nobody measured.
    threads: FLOP/s of an fp32 product by number of CPU threads.
    tf32: FLOP/s with operands rounded to TF32, None where there is no such thing.
    copy: bytes read and written per second. threads is empty, and the other two are None, where nobody measured.
    documents: of documents as long as the run's, by form: matmul | sdpa | varlen on a packed row, and "padded", the
        same documents in padded rows; empty where nobody measured.
    """

    products: Mapping[DType, float] = field(default_factory=dict)
    attention: tuple[AttentionTrial, ...] = ()
    attention_dtype: DType | None = None
    attention_length: int | None = None
    threads: Mapping[int, float] = field(default_factory=dict)
    tf32: float | None = None
    copy: float | None = None
    documents: tuple[AttentionTrial, ...] = ()
    pointwise: tuple[PointwiseTrial, ...] = ()  # empty where nobody measured


_MEASUREMENTS = TypeAdapter(Measurements)


def measurements_to_json(measurements: Measurements) -> dict[str, Any]:
    """Plain lists, dicts, strings and numbers."""
    return _MEASUREMENTS.dump_python(measurements, mode="json")


def measurements_from_json(data: Mapping[str, object]) -> Measurements:
    """The inverse; of an empty table, no measurements."""
    return _MEASUREMENTS.validate_python(dict(data))


@dataclass(frozen=True)
class LengthFacts:
    """Lengths of the training examples in tokens.

    longest: of all; typical: the longest of an ordinary micro-batch.
    supervised: the largest share of supervised tokens that a micro-batch may have, 1.0 where unknown.
    mean: of all, 0 where unknown.
    mix: some lengths as they stand side by side in a step.
    padding: what share of the tokens of padded micro-batches is padding.
    shared: of those tokens what is computed, padding too, where what both answers of a pair begin with is computed
        once.
    evaluated: the longest evaluation example, 0 where there is none.
    pictures: some examples have pictures.
    """

    longest: int
    typical: int
    supervised: float = 1.0
    mean: float = 0.0
    mix: tuple[int, ...] = ()
    padding: float = 0.0
    shared: float = 1.0
    evaluated: int = 0
    pictures: bool = False


def longest_example(limit: int, lengths: LengthFacts | None) -> int:
    """Tokens of the longest example that the run may see. limit: `max_length`."""
    return min(limit, lengths.longest) if lengths else limit


def longest_document(limit: int, lengths: LengthFacts | None) -> int:
    """The same with those that the run evaluates, which are packed like those that it learns."""
    return min(limit, max(lengths.longest, lengths.evaluated)) if lengths else limit
