"""Where did the first non-finite value come from? Replay the step and watch every module, forward and backward.

Used only after a step went wrong, so it may be slow: two hooks per module, one finiteness check per tensor.

A module's input gets an identity of its own in front of it. So the gradient that is seen there is what this module
passes back, and not the sum with what others do that read the same tensor: the module that spoilt it has a name.

A model that is compiled is looked at as it is written: compiled code has no modules, and knows no hooks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from surefoot.data.batch import RecordName, Weighted
from surefoot.models.compiled import as_written
from surefoot.models.fast.chunked_head import watched_logits
from surefoot.objectives.base import Objective
from surefoot.training.engine import Engine
from surefoot.training.ranks import text_from
from surefoot.training.report import example_list
from surefoot.training.scaling import LossScale
from surefoot.training.step import LOSS, StepSettings, add_gradient, draw_number, draw_numbered, step_size

Phase = Literal["forward", "loss", "backward", "gradient", "parameter"]
_PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "gradient", "parameter")  # the most certain first


@dataclass(frozen=True)
class TensorFacts:
    """A tensor that is not finite. nan, inf: how many numbers are. largest: magnitude among the finite ones, None where
    there are none. sha256: of its bytes, by which a replay knows it again."""

    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    largest: float | None
    sha256: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        flat = tensor.detach().contiguous()
        finite = flat[torch.isfinite(flat)]
        return cls(
            tuple(flat.shape),
            str(flat.dtype).removeprefix("torch."),
            int(flat.isnan().sum()),
            int(flat.isinf().sum()),
            float(finite.abs().max()) if finite.numel() else None,
            hashlib.sha256(flat.cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        )

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "1"
        rest = "" if self.largest is None else f", the largest finite one {self.largest:.4g}"
        return f"{self.nan} NaN and {self.inf} infinite of {size} {self.dtype}{rest}"


@dataclass(frozen=True)
class Origin:
    """module: full name; of the loss function: "loss"; of a gradient that overflowed although all that led to it was
    finite: the parameter. phase: where its value was first seen non-finite. examples: of the micro-batch that was
    replayed, the number `micro_batch` of this rank's. tensor: that value."""

    module: str
    phase: Phase
    examples: tuple[RecordName, ...]
    micro_batch: int = 0
    tensor: TensorFacts | None = None

    def __str__(self) -> str:
        return f"{self.what} was the first non-finite value (examples {example_list(self.examples)})"

    @property
    def what(self) -> str:
        """The value in words."""
        return {
            "forward": f"the output of {self.module}",
            "loss": "the loss itself, from finite outputs,",
            "backward": f"the gradient that {self.module} passes back",
            "gradient": f"the output gradient of {self.module}",
            "parameter": f"the gradient of {self.module}",
        }[self.phase]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Origin:
        tensor = data["tensor"]
        facts = None if tensor is None else TensorFacts(**{**tensor, "shape": tuple(tensor["shape"])})
        return cls(**{**data, "examples": tuple(data["examples"]), "tensor": facts})


@dataclass(frozen=True)
class Finding:
    """What a replay saw. origin: None where everything was finite. losses: sums of the micro-batches up to the bad one,
    fp32; of all where none was."""

    origin: Origin | None
    losses: tuple[float, ...]


def find_origin(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    scale: LossScale | None,
    settings: StepSettings,
) -> Finding:
    """Replay a step that was not finite, with its own draws, and look after each micro-batch. Every rank must replay
    all of its own, because they wait for each other in every pass."""
    weight = step_size(engine, micro_batches).weight
    numbers = [draw_number(engine, number) for number in range(len(micro_batches))]
    return examine(
        engine, objective, micro_batches, step=step, weight=weight, numbers=numbers, scale=scale, settings=settings
    )


def examine(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    weight: int,
    numbers: Sequence[int],
    scale: LossScale | None,
    settings: StepSettings,
    look: bool = True,
) -> Finding:
    """The same of batches that were another process's. weight: of the whole step. numbers: see `draw_number`. look: at
    the modules; without, the passes are the step's own, compiled where the model is."""
    origin = None
    losses: list[float] = []
    try:
        for place, (batch, number) in enumerate(zip(micro_batches, numbers, strict=True)):
            draw_numbered(settings, step, number)
            with _watch(engine.model) if look else nullcontext([]) as seen:
                sums = add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings)
            if origin is None:
                losses.append(float(sums[LOSS]))
                origin = _origin(engine, seen, sums, batch.examples, place)
            if origin is not None and engine.world == 1:
                break
        return Finding(origin, tuple(losses))
    finally:
        engine.discard()


def source_of(engine: Engine, origin: Origin | None) -> int | None:
    """The rank whose origin is most certain, and among those the lowest; the same on all, which must all ask. Gradients
    of parameters may have been added up over the ranks already when they are looked at, so they come last."""
    places = [0.0] * engine.world
    places[engine.rank] = 1.0 + _PHASES.index(origin.phase) if origin else 0.0
    found = [(place, rank) for rank, place in enumerate(engine.totals(places)) if place]
    return min(found)[1] if found else None


def agreed_origin(engine: Engine, origin: Origin | None) -> str | None:
    """In words, the same on all ranks."""
    source = source_of(engine, origin)
    if source is None:
        return None
    said = f"on rank {source} {origin}" if engine.world > 1 else str(origin)
    return text_from(source, said, engine.ranks)


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """The module in whose forward pass an exception was raised, by name, or by its class where it is no part of
    `model`, as in a reference that stands apart; empty where it was in none."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            found = names.get(id(own), type(own).__name__)
        trace = trace.tb_next
    return found


def _origin(
    engine: Engine,
    seen: Sequence[tuple[str, Phase, TensorFacts]],
    sums: Mapping[str, torch.Tensor],
    examples: tuple[RecordName, ...],
    place: int,
) -> Origin | None:
    loss = sums[LOSS]
    if not torch.isfinite(loss) and not any(phase == "forward" for _, phase, _ in seen):
        return Origin("loss", "loss", examples, place, TensorFacts.of(loss))
    if seen:
        module, phase, facts = seen[0]
        return Origin(module, phase, examples, place, facts)
    for name, gradient in engine.gradients().items():  # overflowed although every activation's was finite
        if not torch.isfinite(gradient).all():
            return Origin(name, "parameter", examples, place, TensorFacts.of(gradient))
    return None


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[tuple[str, Phase, TensorFacts]]]:
    """Collect (module, phase, tensor) in the order in which non-finite values appear; only the first of each pass is
    kept. Children come before their parents."""
    seen: list[tuple[str, Phase, TensorFacts]] = []
    passes: set[bool] = set()

    def note(name: str, phase: Phase, tensor: torch.Tensor) -> None:
        forward = phase == "forward"
        if forward not in passes and not torch.isfinite(tensor).all():
            passes.add(forward)
            seen.append((name, phase, TensorFacts.of(tensor)))

    def before(name: str) -> Callable[..., Any]:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            alias = tensor.view_as(tensor)
            alias.register_hook(lambda gradient: note(name, "backward", gradient))
            return alias

        return lambda module, inputs, named: (_mapped(inputs, own), _mapped(named, own))

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in float_tensors(output):
                note(name, "forward", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: note(name, "gradient", gradient))

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    names = {module: name for name, module in named}
    handles = [module.register_forward_hook(after(name)) for name, module in named]
    handles += [module.register_forward_pre_hook(before(name), with_kwargs=True) for name, module in named]
    try:
        with as_written(model), watched_logits(model, lambda head, logits: note(names[head], "forward", logits)):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A module's arguments with each floating-point tensor changed, in the plain containers that arguments come in."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, change) for one in value)
    if type(value) is dict:
        return {name: _mapped(one, change) for name, one in value.items()}
    return value


def float_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors of a module's output, whatever it is wrapped in."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from float_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from float_tensors(value)
