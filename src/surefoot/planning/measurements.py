"""Results of the probes on this machine, as plain values for plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from surefoot.planning.plan import DType

PADDED = "padded"  # the trial of documents in padded rows, the baseline of packing
MEMORY_TAKEN = "as memory was in use"  # why fewer shapes are timed than with free memory


@dataclass(frozen=True)
class AttentionTrial:
    """One form of attention: eager, or SDPA restricted to one kernel.

    seconds: best forward and backward pass; 0 if it was not timed.
    failure: why it did not run, or how its results are wrong; empty if it is correct.
    errors: the largest relative error by compared quantity.
    timed: shapes that were timed if smaller than the run's ("at 1024 of 4096 tokens"); else empty.
    untimed: why a form without known errors could not be timed; empty if it was.
    """

    form: str  # eager | flash | mem_efficient | cudnn | math
    seconds: float
    failure: str
    errors: Mapping[str, float] = field(default_factory=dict)
    timed: str = ""
    untimed: str = ""

    @property
    def trouble(self) -> str:
        """Why the form cannot be chosen; empty if it can."""
        return self.failure or self.untimed

    @property
    def remarks(self) -> str:
        """Why it failed, or was timed only in part."""
        return f"{self.trouble} {self.timed}"

    @property
    def passed(self) -> bool:
        """Whether it is correct and was timed."""
        return not self.trouble


def times_of(trials: Sequence[AttentionTrial]) -> str:
    """Format the times of forms that passed, with their shapes if smaller than the run's."""
    passed = [trial for trial in trials if trial.passed]
    at = {trial.timed for trial in passed}
    common = f", {min(at)}" if len(at) == 1 and min(at) else ""
    own = {one.form: "" if common or not one.timed else f" ({one.timed})" for one in passed}
    times = ", ".join(f"{one.form} {1000 * one.seconds:.3g}{own[one.form]}" for one in passed)
    return f"forward and backward here{common}: {times}"


@dataclass(frozen=True)
class PointwiseSizes:
    """A model's sizes: width of its norms, number of query heads, size of each head, number of key heads (0: as many),
    width and activation (silu | gelu) of its gated MLPs."""

    width: int
    heads: int
    head_dim: int
    kv_heads: int = 0
    intermediate: int = 0
    activation: str = ""


@dataclass(frozen=True)
class PointwiseTrial:
    """One kind of operators at the model's width, plain and fused.

    part: norm | rotary | gated (also gate in plans made before 2026-11-23).
    plain, fused: seconds of the best forward and backward pass; 0 if it was not timed.
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
    """Results of the probes on this machine; empty or None if not measured.

    products: FLOP/s of matrix products at the model's shapes, by dtype.
    attention: one trial per form at `attention_length` tokens in `attention_dtype`.
    threads: FLOP/s of an fp32 product by number of CPU threads.
    tf32: FLOP/s with operands rounded to TF32; None if the device has no TF32.
    copy: bytes read and written per second.
    documents: trials with documents of the run's lengths, by form (`surefoot.planning.packing.Form`) on a packed row,
        and "padded", the same documents in padded rows.
    pointwise: trials of norms, rotary embeddings and gated activations.
    """

    products: Mapping[DType, float] = field(default_factory=dict)
    attention: tuple[AttentionTrial, ...] = ()
    attention_dtype: DType | None = None
    attention_length: int | None = None
    threads: Mapping[int, float] = field(default_factory=dict)
    tf32: float | None = None
    copy: float | None = None
    documents: tuple[AttentionTrial, ...] = ()
    pointwise: tuple[PointwiseTrial, ...] = ()


_MEASUREMENTS = TypeAdapter(Measurements)


def measurements_to_json(measurements: Measurements) -> dict[str, Any]:
    """Plain lists, dicts, strings and numbers."""
    return _MEASUREMENTS.dump_python(measurements, mode="json")


def measurements_from_json(data: Mapping[str, object]) -> Measurements:
    """Inverse of `measurements_to_json`; an empty table gives no measurements."""
    return _MEASUREMENTS.validate_python(dict(data))


@dataclass(frozen=True)
class LengthFacts:
    """Lengths of the training examples in tokens.

    longest: the longest of all; typical: the longest of an ordinary micro-batch.
    supervised: the largest fraction of supervised tokens of a micro-batch; 1.0 if unknown.
    mean: mean length; 0 if unknown.
    mix: representative lengths, in the order in which a step may contain them.
    padding: fraction of padding in padded micro-batches.
    shared: fraction of the tokens of padded micro-batches that is computed if the common prefix of a pair is computed
        once.
    evaluated: the longest evaluation example; 0 if there is none.
    pictures: whether some examples have images.
    features: the most image tokens of a training example.
    texts: number of training examples without images.
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
    features: int = 0
    texts: int = 0

    @property
    def uniform(self) -> bool:
        """Whether all examples have the same number of tokens, as far as these facts show."""
        return not self.padding and set(self.mix) == {self.longest} and self.evaluated in (0, self.longest)


def longest_example(limit: int, lengths: LengthFacts | None) -> int:
    """Tokens of the longest training example that the run may see. limit: `max_length`."""
    return min(limit, lengths.longest) if lengths else limit


def longest_document(limit: int, lengths: LengthFacts | None) -> int:
    """Tokens of the longest training or evaluation example; both are packed alike."""
    return min(limit, max(lengths.longest, lengths.evaluated)) if lengths else limit
