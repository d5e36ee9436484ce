"""Where did the first non-finite value come from? Replay the step and watch every module.

Used only after a run has given up, so it may be slow: one hook per module, one finiteness check per output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from surefoot.data.batch import RecordName, Weighted
from surefoot.objectives.base import Objective
from surefoot.training.engine import Engine
from surefoot.training.ranks import text_from
from surefoot.training.scaling import LossScale
from surefoot.training.step import LOSS, StepSettings, add_gradient, draw, step_size

Phase = Literal["forward", "loss", "gradient", "parameter"]
_PHASES: tuple[Phase, ...] = ("forward", "loss", "gradient", "parameter")  # the most certain first


@dataclass(frozen=True)
class Origin:
    """module: full name; of the loss function: "loss"; of a gradient that overflowed although all that led to it was
    finite: the parameter. phase: where its value was first seen non-finite. examples: of the micro-batch that was
    replayed."""

    module: str
    phase: Phase
    examples: tuple[RecordName, ...]

    def __str__(self) -> str:
        what = {
            "forward": f"the output of {self.module}",
            "loss": "the loss itself, from finite outputs,",
            "gradient": f"the output gradient of {self.module}",
            "parameter": f"the gradient of {self.module}",
        }[self.phase]
        numbers = ", ".join(str(number) for number in self.examples)
        return f"{what} was the first non-finite value (examples {numbers})"


def find_origin(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    scale: LossScale | None,
    settings: StepSettings,
) -> Origin | None:
    """Replay a step that was not finite, with its own draws, and look after each micro-batch; None when everything is
    finite this time. Every rank must replay all of its own, because they wait for each other in every pass."""
    weight = step_size(engine, micro_batches).weight
    origin = None
    try:
        for number, batch in enumerate(micro_batches):
            draw(engine, settings, step, number)
            with _watch(engine.model) as seen:
                sums = add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings)
            origin = origin or _origin(engine, seen, sums, batch.examples)
            if origin is not None and engine.world == 1:
                break
        return origin
    finally:
        engine.discard()


def agreed_origin(engine: Engine, origin: Origin | None) -> str | None:
    """In words, the same on all ranks: of the one that is most certain, and among those of the lowest rank. Gradients
    of parameters may have been added up over the ranks already when they are looked at, so they come last."""
    places = [0.0] * engine.world
    places[engine.rank] = 1.0 + _PHASES.index(origin.phase) if origin else 0.0
    found = [(place, rank) for rank, place in enumerate(engine.totals(places)) if place]
    if not found:
        return None
    source = min(found)[1]
    said = f"on rank {source} {origin}" if engine.world > 1 else str(origin)
    return text_from(source, said, engine.ranks)


def _origin(
    engine: Engine,
    seen: Sequence[tuple[str, Phase]],
    sums: Mapping[str, torch.Tensor],
    examples: tuple[RecordName, ...],
) -> Origin | None:
    if not torch.isfinite(sums[LOSS]) and not any(phase == "forward" for _, phase in seen):
        return Origin("loss", "loss", examples)
    if seen:
        return Origin(*seen[0], examples)
    gradient = _non_finite_gradient(engine)
    return None if gradient is None else Origin(gradient, "parameter", examples)


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[tuple[str, Phase]]]:
    """Collect (module, phase) in the order in which non-finite values appear. Children come before their parents."""
    seen: list[tuple[str, Phase]] = []

    def watch_output(name: str):
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not torch.isfinite(tensor).all():
                    seen.append((name, "forward"))
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: _note_gradient(name, gradient))

        return hook

    def _note_gradient(name: str, gradient: torch.Tensor) -> None:
        if not torch.isfinite(gradient).all():
            seen.append((name, "gradient"))

    handles = [module.register_forward_hook(watch_output(name)) for name, module in model.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors of a module's output, whatever it is wrapped in."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _non_finite_gradient(engine: Engine) -> str | None:
    """A parameter whose own gradient overflowed although every activation gradient was finite."""
    return next((name for name, gradient in engine.gradients().items() if not torch.isfinite(gradient).all()), None)
