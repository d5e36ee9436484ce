"""What `surefoot tune` may change, in the order in which it tries: first what changes most.

What the config sets stays as it is set; only what it leaves open is varied. A value that cannot run here, or whose
forecast does not fit, is never started; the reason is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.planning.measurements import Measurements
from surefoot.planning.plan import PLAIN, DType, RunPlan
from surefoot.system.hardware import Hardware

Settings = Mapping[str, Any]  # dotted key -> value
_BESIDE_THE_PLAN = ("data.workers",)  # keys that change how fast a run is, and nothing in its plan
_PADDED: Settings = {"data.packing": "off"}
_MUCH_SLOWER = 3.0  # times: a type whose products are so much slower than the fastest one's is not tried
_WAITING = 0.02  # share of a step: with less, threads that prepare batches have nothing to win


@dataclass(frozen=True)
class Axis:
    """key: "batch.micro". values: in order of size where they have one. ordered: the rate rises up to one of them and
    falls beyond it, so neighbours are tried, and not all. auto: the value that "auto", which may be more than any one
    of them, comes nearest to. needs: value -> what else has to be so, if it is varied, for the value to be possible."""

    key: str
    values: tuple[Any, ...]
    ordered: bool = False
    auto: Any = None
    needs: Mapping[Any, Settings] = field(default_factory=dict)

    def place(self, value: Any) -> Any:
        """Where a value stands among the others of an ordered axis."""
        return self.auto if value == "auto" else value


@dataclass(frozen=True)
class Space:
    """start: values that plan what the config plans, one for every axis. left_out: key and why it is not varied."""

    axes: tuple[Axis, ...]
    start: Settings
    left_out: tuple[tuple[str, str], ...]


def make_space(
    config: RunConfig, given: Collection[str], plan: RunPlan, machine: Hardware, seen: Measurements
) -> Space:
    """given: dotted keys that the user set, see `given_keys`. seen: what the probes measured for the plan."""
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
                (axis.key, f"{', '.join(map(str, axis.values))} is all that can run here, or all worth trying")
            )
    return Space(tuple(kept), {axis.key: start[axis.key] for axis in kept}, tuple(left_out))


def given_keys(config: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Dotted keys that a plain config sets to anything but auto, which leaves them open."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from given_keys(value, f"{group}{name}.")
        elif value != "auto":
            yield f"{group}{name}"


def beside_the_plan(settings: Settings) -> dict[str, Any]:
    """What two settings may differ in although they plan the same."""
    return {key: settings[key] for key in _BESIDE_THE_PLAN if key in settings}


def needs_threads(waiting: float) -> bool:
    """waiting: share of a step that goes by before its batches are there."""
    return waiting > _WAITING


def _start(config: RunConfig, plan: RunPlan) -> dict[str, Any]:
    return {
        "precision.compute": plan.precision.compute.value,
        "data.packing": "off" if plan.kernels.documents.value == PLAIN else "on",
        "attention.implementation": "auto",  # which leaves packed rows the choice among forms, that no value names
        "batch.micro": "auto",  # a budget of tokens, which no number of examples says
        "gradient_checkpointing": "auto" if plan.memory.gradient_checkpointing.value else "off",
        "compile": plan.compile.value,
        "data.workers": config.data.workers,
    }


def _dtypes(machine: Hardware, seen: Measurements, plan: RunPlan) -> tuple[str, ...]:
    """fp16 needs a loss scale and is the same speed as bf16 where a GPU has both, so it stands in for it only."""
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
    """Powers of two up to the examples of a step, and these."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, most]))


def neighbours(axis: Axis, at: Any) -> Sequence[Any]:
    """What to try next from a value of an ordered axis: the next larger one first."""
    here = axis.place(at)
    larger = sorted(value for value in axis.values if value > here)
    smaller = sorted((value for value in axis.values if value < here), reverse=True)
    return [*larger[:1], *smaller[:1]]
