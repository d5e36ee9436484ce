"""The search of `surefoot tune`: which keys it varies, and in which order it tries their values.

Settings in the config are kept; only others are varied. A value that cannot run here, or whose memory forecast does not
fit, is never started; the reason is recorded.

The search varies one axis at a time, those with the largest effect first, starting from the plan's own choices. Speed
is nearly a product of independent factors (type, kernels) and of the micro-batch size. Some keys shift the best
micro-batch size, so each of their values is judged at its own best size; the walk is repeated until nothing changes.
The search knows no process and no file: the function that tries a setting is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.planning.measurements import Measurements
from surefoot.planning.plan import PLAIN, DType, RunPlan
from surefoot.system.hardware import Hardware

Settings = Mapping[str, Any]  # dotted key -> value
_PADDED: Settings = {"data.packing": "off"}
_MUCH_SLOWER = 3.0  # factor: types whose products are slower than the fastest by this much are not tried
_WAITING = 0.02  # share of a step spent waiting below which data workers cannot help


@dataclass(frozen=True)
class Axis:
    """A key to vary.

    key: such as "batch.micro".
    values: sorted by size if they have one.
    ordered: whether the speed rises up to one value and falls beyond it, so that only neighbors are tried.
    auto: the value closest to "auto", which may be a mixture of several.
    needs: value -> settings that it requires, if those are varied.
    """

    key: str
    values: tuple[Any, ...]
    ordered: bool = False
    auto: Any = None
    needs: Mapping[Any, Settings] = field(default_factory=dict)

    def next(self, value: Any, *, larger: bool) -> Any:
        """The next larger or smaller value on an ordered axis, None at its end."""
        here = self.auto if value == "auto" else value
        further = [one for one in self.values if (one > here if larger else one < here)]
        return (min if larger else max)(further, default=None)


@dataclass(frozen=True)
class Space:
    """start: values that reproduce the config's plan, one per axis. left_out: (key, why it is not varied)."""

    axes: tuple[Axis, ...]
    start: Settings
    left_out: tuple[tuple[str, str], ...]


def make_space(
    config: RunConfig, given: Collection[str], plan: RunPlan, machine: Hardware, seen: Measurements
) -> Space:
    """given: dotted keys that the user set, see `given_keys`. seen: what the plan's probes measured."""
    axes: list[Axis] = [
        Axis("precision.compute", _dtypes(machine, seen, plan)),
        Axis("data.packing", ("off", "on")),
        Axis("attention.implementation", _attention(machine), needs={"eager": _PADDED, "flash_attention_2": _PADDED}),
        Axis("batch.micro", _sizes(plan.batch.size.value), ordered=True, auto=plan.batch.micro.value),
        Axis("gradient_checkpointing", ("off", "auto")),
        Axis("compile", ("off", "default"), needs={"default": _PADDED}),
        Axis("data.workers", (0, 1), ordered=True),
    ]
    start = _start(config, plan)
    kept, left_out = [], list[tuple[str, str]]()
    for axis in axes:
        if axis.key in given:
            left_out.append((axis.key, "the config sets it"))
        elif axis.key == "data.packing" and not config.method.packs:
            left_out.append((axis.key, f"stage {config.stage} has no packed batches"))
        elif len(axis.values) > 1:
            kept.append(axis)
        else:
            left_out.append(
                (
                    axis.key,
                    f"{', '.join(map(str, axis.values))} is the only value that can run here, or that is worth trying",
                )
            )
    return Space(tuple(kept), {axis.key: start[axis.key] for axis in kept}, tuple(left_out))


def given_keys(config: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Dotted keys that a plain config sets to anything but auto."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from given_keys(value, f"{group}{name}.")
        elif value != "auto":
            yield f"{group}{name}"


def _start(config: RunConfig, plan: RunPlan) -> dict[str, Any]:
    return {
        "precision.compute": plan.precision.compute.value,
        "data.packing": "off" if plan.kernels.documents.value == PLAIN else "on",
        "attention.implementation": "auto",  # lets packed rows choose a kernel that no value names
        "batch.micro": "auto",  # a token budget, which no number of examples expresses
        "gradient_checkpointing": "auto" if plan.memory.gradient_checkpointing.value else "off",
        "compile": plan.compile.value,
        "data.workers": config.data.workers,
    }


def _dtypes(machine: Hardware, seen: Measurements, plan: RunPlan) -> tuple[str, ...]:
    """The types to try. fp16 needs a loss scale and is as fast as bf16 on GPUs that have both, so it is only a
    substitute."""
    names: list[DType] = ["fp32", "bf16"] if machine.kind != "cuda" or machine.bf16 else ["fp32", "fp16"]
    if seen.products:
        fastest = max(seen.products.values())
        names = [name for name in names if seen.products.get(name, 0) * _MUCH_SLOWER >= fastest]
    planned = plan.precision.compute.value
    return tuple(names) if planned in names else (planned, *names)


def _attention(machine: Hardware) -> tuple[str, ...]:
    forms = ["auto", "sdpa", "eager"]
    if machine.kind == "cuda" and find_spec("flash_attn") is not None:
        forms.append("flash_attention_2")
    return tuple(forms)


def _sizes(most: int) -> tuple[int, ...]:
    """Powers of two up to the number of examples in a step, and that number."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, most]))


GAIN = 1.02  # factor by which a setting must be faster to replace another; less is noise
_MOVE_THE_SIZE = ("data.packing", "gradient_checkpointing")
_PAID_BEFORE_STEP_1 = ("compile",)  # if it takes too long once, it will with other settings too


@dataclass(frozen=True)
class Tried:
    """A setting and its result.

    failure: why it is rejected, empty if it passed.
    rate: real tokens per second, 0 if not timed.
    memory: measured bytes.
    waiting: share of a step spent waiting for batches.
    early: it was so slow that it was stopped before all its steps were timed.
    held_up: share of its time in which other programs used the processor.
    short_of_memory, unfinished: whether it failed for lack of memory, or because it took too long.
    """

    settings: Settings
    rate: float = 0.0
    memory: int = 0
    waiting: float = 0.0
    failure: str = ""
    early: bool = False
    held_up: float = 0.0
    short_of_memory: bool = False
    unfinished: bool = False

    @property
    def passed(self) -> bool:
        return not self.failure


Try = Callable[[Settings], Tried]  # returns the same object for settings with the same plan


class Search:
    """tried: every setting that was considered, once, in order."""

    def __init__(self, space: Space, attempt: Try, on_trial: Callable[[Tried], None]):
        """on_trial: called with each setting after its trial."""
        self._space, self._attempt, self._on_trial = space, attempt, on_trial
        self.tried: list[Tried] = []

    def run(self) -> Tried:
        """Return the best setting that passed: the start if it passed and nothing was clearly faster. If nothing
        passed, return the start with its failure."""
        best, before = self._look(self._space.start), None
        while best is not before:
            before = best
            for axis in self._space.axes:
                best = self._along(axis, best)
        return best

    @property
    def best(self) -> Tried:
        """The best of all trials so far, by the rule of `run`."""
        best = self.tried[0]
        for other in self.tried[1:]:
            best = better(best, other)
        return best

    def _along(self, axis: Axis, best: Tried) -> Tried:
        # Only worth trying if steps wait for batches.
        if axis.key == "data.workers" and best.passed and best.waiting <= _WAITING:
            return best
        if axis.key == "gradient_checkpointing" and not any(one.short_of_memory for one in self.tried):
            return best
        return self._climb(axis, best) if axis.ordered else self._compare(axis, best)

    def _compare(self, axis: Axis, best: Tried) -> Tried:
        here = best.settings
        for value in axis.values:
            if axis.key in _PAID_BEFORE_STEP_1 and self._took_too_long(axis.key, value):
                continue
            needed = {key: one for key, one in axis.needs.get(value, {}).items() if key in here}
            other = self._look({**here, **needed, axis.key: value})
            if axis.key in _MOVE_THE_SIZE and value != here[axis.key] and (other.rate or other.short_of_memory):
                other = self._at_its_own_size(other)
            best = better(best, other)
        return best

    def _at_its_own_size(self, tried: Tried) -> Tried:
        size = next((axis for axis in self._space.axes if axis.key == "batch.micro"), None)
        return tried if size is None else self._climb(size, tried)

    def _climb(self, axis: Axis, best: Tried) -> Tried:
        """Try larger values while they help, else smaller ones while they do."""
        start = best
        for larger in (True, False):
            while (value := axis.next(best.settings[axis.key], larger=larger)) is not None:
                nearer = better(best, self._look({**best.settings, axis.key: value}))
                if nearer is best:
                    break
                best = nearer
            if best is not start:
                break
        return best

    def _look(self, settings: Settings) -> Tried:
        known = next((one for one in self.tried if one.settings == settings), None)
        if known is not None:
            return known
        found = self._attempt(settings)
        if not any(found is one for one in self.tried):
            self.tried.append(found)
            self._on_trial(found)
        return found

    def _took_too_long(self, key: str, value: Any) -> bool:
        return any(one.unfinished and one.settings.get(key) == value for one in self.tried)


def better(best: Tried, other: Tried) -> Tried:
    """`other` if it passed and is clearly faster, or if the best one did not pass."""
    if not other.passed:
        return best
    return other if not best.passed or other.rate > GAIN * best.rate else best
