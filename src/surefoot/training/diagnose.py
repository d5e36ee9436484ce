"""Where did the first non-finite value come from? Replay the step and watch every module, forward and backward.

Used only after a step went wrong, so it may be slow: two hooks per module, one finiteness check per tensor.

A module's input gets an identity of its own in front of it. So the gradient that is seen there is what this module
passes back, and not the sum with what others do that read the same tensor: the module that spoilt it has a name.

Attention, rotary positions, residual sums are code of a module between those inside of it, and no module of their own.
What they spoil is first seen in front of the next module, or behind the last one on the way back: then the module that
was under way is named as well.

A model that is compiled is looked at as it is written: compiled code has no modules, and knows no hooks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from surefoot.data.batching.batch import RecordName, Weighted
from surefoot.models.convert.tensors import as_bytes
from surefoot.models.fast.chunked_head import watched_logits
from surefoot.models.modes import eager_mode
from surefoot.training.engine import Engine
from surefoot.training.objective import Objective
from surefoot.training.ranks import text_from
from surefoot.training.report import example_list
from surefoot.training.state import LossScale
from surefoot.training.step import LOSS, StepSettings, add_gradient, draw_number, seed_micro_batch, step_size

Phase = Literal["forward", "input", "loss", "backward", "gradient", "parameter"]
_PHASES: tuple[Phase, ...] = ("forward", "input", "loss", "backward", "gradient", "parameter")  # most certain first


@dataclass(frozen=True)
class TensorFacts:
    """A tensor that is not finite.

    nan, inf: how many numbers are.
    largest: magnitude among the finite ones, None where there are none.
    sha256: of its bytes, by which a replay knows it again.
    """

    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    largest: float | None
    sha256: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        flat = tensor.detach().contiguous()
        return cls(
            tuple(flat.shape),
            str(flat.dtype).removeprefix("torch."),
            int(flat.isnan().sum()),
            int(flat.isinf().sum()),
            largest_finite(flat),
            hashlib.sha256(as_bytes(flat.cpu()).numpy().data).hexdigest(),
        )

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "1"
        rest = "" if self.largest is None else f", the largest finite one {self.largest:.4g}"
        return f"{self.nan} NaN and {self.inf} infinite of {size} {self.dtype}{rest}"


@dataclass(frozen=True)
class Origin:
    """Where a value was first seen that is not finite.

    module: full name; of the loss function: "loss"; of a gradient that overflowed although all that led to it was
        finite: the parameter.
    phase: where its value was first seen non-finite.
    examples: of the micro-batch that was replayed, the number `micro_batch` of this rank's.
    tensor: that value.
    made_in: the module whose own code made it, from finite values; "" for the model as a whole, or none; None in
        records of earlier versions, which do not have it.
    """

    module: str
    phase: Phase
    examples: tuple[RecordName, ...]
    micro_batch: int = 0
    tensor: TensorFacts | None = None
    made_in: str | None = None

    def __str__(self) -> str:
        return f"{self.what} was the first non-finite value (examples {example_list(self.examples)})"

    @property
    def what(self) -> str:
        """The value in words."""
        return self.what_of(self.module)

    def what_of(self, name: str) -> str:
        """The same with another name for the module."""
        maker = self.made_in or "the model"
        passed = "" if self.made_in is None else f", which {maker} itself passes back,"
        return {
            "forward": f"the output of {name}",
            "input": f"the input of {name}, which {maker} itself computes,",
            "loss": "the loss itself, from finite outputs,",
            "backward": f"the gradient that {name} passes back",
            "gradient": f"the output gradient of {name}{passed}",
            "parameter": f"the gradient of {name}",
        }[self.phase]

    @property
    def way(self) -> str:
        """Which pass, however it was seen there."""
        return {"input": "forward", "gradient": "backward"}.get(self.phase, self.phase)

    @property
    def maker(self) -> str:
        """The module that made it, as far as it is known; of phases without one, what they name."""
        return self.module if self.made_in is None or self.phase in ("loss", "parameter") else self.made_in

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Origin:
        tensor = data["tensor"]
        facts = None if tensor is None else TensorFacts(**{**tensor, "shape": tuple(tensor["shape"])})
        return cls(**{**data, "examples": tuple(data["examples"]), "tensor": facts})


@dataclass(frozen=True)
class Finding:
    """What a replay saw.

    origin: None where everything was finite.
    losses: sums of the micro-batches up to the bad one, fp32; of all where none was.
    """

    origin: Origin | None
    losses: tuple[float, ...]


def largest_finite(tensor: torch.Tensor) -> float | None:
    """The largest magnitude among the finite numbers, None where there are none."""
    if not tensor.numel():
        return None
    largest = max(abs(float(bound)) for bound in torch.aminmax(tensor))
    if math.isfinite(largest):  # no copy of what may be all weights of a model
        return largest
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else None


def find_origin(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    scale: LossScale | None,
    settings: StepSettings,
    weight: int | None = None,
    numbers: Sequence[int] | None = None,
    look: bool = True,
) -> Finding:
    """Replay a step that was not finite, with its own random draws, and look after each micro-batch. Every rank must
    replay all of its own micro-batches, because they wait for each other in every pass.

    weight, numbers: of a step of another process, its weight over all ranks and the `draw_number` of each micro-batch.
    look: at the modules; without, the passes are the step's own, compiled where the model is.
    """
    weight = step_size(engine, micro_batches)[0] if weight is None else weight
    numbers = [draw_number(engine, number) for number in range(len(micro_batches))] if numbers is None else numbers
    origin = None
    losses: list[float] = []
    try:
        for place, (batch, number) in enumerate(zip(micro_batches, numbers, strict=True)):
            seed_micro_batch(settings.seed, step, number)  # the draws of the step itself, else it is another step
            with _watch(engine.model) if look else nullcontext([]) as seen:
                sums = add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings)
            if origin is None:
                losses.append(float(sums[LOSS]))
                found = _origin(engine, seen, sums[LOSS])
                origin = None if found is None else replace(found, examples=batch.examples, micro_batch=place)
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
    text = f"on rank {source} {origin}" if engine.world > 1 else str(origin)
    return text_from(source, text, engine.ranks)


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


def _origin(engine: Engine, seen: Sequence[Origin], loss: torch.Tensor) -> Origin | None:
    """Of one micro-batch.

    seen: by its hooks.
    loss: its sum.
    """
    if not torch.isfinite(loss) and not any(one.phase in ("forward", "input") for one in seen):
        return _sighting("loss", "loss", loss, "")
    if seen:
        return seen[0]
    for name, gradient in engine.gradients().items():  # overflowed although every activation's was finite
        if not torch.isfinite(gradient).all():
            return _sighting(name, "parameter", gradient, "")
    return None


def _sighting(module: str, phase: Phase, tensor: torch.Tensor, made_in: str) -> Origin:
    return Origin(module, phase, (), tensor=TensorFacts.of(tensor), made_in=made_in)


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[Origin]]:
    """Collect what is not finite in the order in which it appears; only the first of each pass is kept. Children come
    before their parents."""
    watch = _Watch()
    named = [(name, module) for name, module in model.named_modules() if name]
    names = {module: name for name, module in named}
    # Always: what is computed again for the backward pass is left by an exception, as soon as it has all it needs.
    handles = [module.register_forward_hook(watch.leaves(name), always_call=True) for name, module in named]
    handles += [module.register_forward_pre_hook(watch.enters(name), with_kwargs=True) for name, module in named]
    try:
        with eager_mode(model), watched_logits(model, lambda head, logits: watch.made(names[head], logits)):
            yield watch.seen
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The hooks of one forward and backward pass.

    seen: the first sighting of the forward pass, and that of the backward pass.
    """

    def __init__(self) -> None:
        self.seen: list[Origin] = []
        self._inside: list[str] = []  # the modules whose forward passes are under way, the innermost last
        self._suspect: Origin | None = None  # an input; whether anything comes of it, outputs tell
        self._forward = self._backward = False  # whether there is one
        self._callers: Any = WeakTensorKeyDictionary()  # outputs: their version, and who got it, the outermost last

    def enters(self, name: str) -> Callable[..., Any]:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            alias = tensor.view_as(tensor)
            alias.register_hook(lambda gradient: self._passed_back(name, "backward", gradient, name))
            return alias

        def hook(module: nn.Module, inputs: Any, named: Any) -> Any:
            caller = self._caller()
            self._inside.append(name)
            if not self._forward and self._suspect is None:
                bad = next((one for one in float_tensors([inputs, named]) if _is_spoilt(one)), None)
                if bad is not None:
                    self._suspect = _sighting(name, "input", bad, caller)
            return _mapped(inputs, own), _mapped(named, own)

        return hook

    def leaves(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            while self._inside and self._inside.pop() != name:
                pass
            caller = self._caller()
            for tensor in float_tensors(output):
                self.made(name, tensor)
                if tensor.requires_grad:
                    self._returns(name, tensor, caller)
            if self._suspect is not None and self._suspect.module == name:
                self._suspect = None

        return hook

    def made(self, name: str, tensor: torch.Tensor) -> None:
        """An output of a module."""
        if not self._forward and not _is_finite(tensor):
            self._forward = True
            self.seen.append(self._suspect or _sighting(name, "forward", tensor, name))

    def _returns(self, name: str, tensor: torch.Tensor, caller: str) -> None:
        """A parent that returns what a module in it returned does nothing with it: its own caller does."""
        known = self._callers.get(tensor)
        if known is not None and known[0] == tensor._version:
            known[1].append(caller)
            return
        callers = [caller]
        self._callers[tensor] = (tensor._version, callers)
        tensor.register_hook(lambda gradient: self._passed_back(name, "gradient", gradient, callers[-1]))

    def _passed_back(self, name: str, phase: Phase, gradient: torch.Tensor, maker: str) -> None:
        if not self._backward and not _is_finite(gradient):
            self._backward = True
            self.seen.append(_sighting(name, phase, gradient, maker))

    def _caller(self) -> str:
        return self._inside[-1] if self._inside else ""


def _is_spoilt(tensor: torch.Tensor) -> bool:
    """Whether an argument is not finite, and no mask, which holds minus infinity on purpose and no gradient."""
    if _is_finite(tensor):
        return False
    return tensor.requires_grad or bool((tensor.isnan() | tensor.isposinf()).any())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Outside of the graph: a layer that is recomputed must save as many tensors the second time, without this look."""
    return bool(torch.isfinite(tensor.detach()).all())


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
