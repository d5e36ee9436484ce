"""Find the origin of the first non-finite value: replay the step with hooks on every module, forward and backward.

Used only after a step failed, so it may be slow: two hooks per module, one finiteness check per tensor.

Each module input is passed through an identity (a view). The gradient at that view is what this module alone passes
back, not the sum over all modules that read the same tensor, so the module that made it non-finite can be named.

Attention, rotary embeddings and residual sums are code of a parent module between its submodules. A non-finite value
from there is first seen at the input of the next submodule or, in the backward pass, at the output of the previous one;
then the parent is named as well.

A compiled model is run in eager mode for this: compiled code has no modules and runs no hooks.
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
_PHASES: tuple[Phase, ...] = (
    "forward",
    "input",
    "loss",
    "backward",
    "gradient",
    "parameter",
)  # most reliable first


@dataclass(frozen=True)
class TensorFacts:
    """Facts about a non-finite tensor.

    nan, inf: number of NaN and of infinite elements.
    largest: largest finite magnitude; None if no element is finite.
    sha256: hash of its bytes, by which a replay recognizes it.
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
    """Where the first non-finite value was seen.

    module: full module name; "loss" for the loss function; the parameter for a gradient that overflowed although all
        activation gradients were finite.
    phase: which value of the module was non-finite.
    examples: examples of the replayed micro-batch.
    micro_batch: its index among this rank's micro-batches.
    tensor: facts about the value.
    made_in: the module whose own code computed it from finite values; "" for the top-level model or none; None in
        records of versions without this field.
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
        """Description of the value."""
        return self.what_of(self.module)

    def what_of(self, name: str) -> str:
        """Describe the value, with `name` for the module."""
        maker = self.made_in or "the model"
        passed = "" if self.made_in is None else f", computed in the backward pass of {maker} itself,"
        return {
            "forward": f"the output of {name}",
            "input": f"the input of {name}, computed by {maker} itself,",
            "loss": "the loss, computed from finite outputs,",
            "backward": f"the gradient that {name} passes back",
            "gradient": f"the output gradient of {name}{passed}",
            "parameter": f"the gradient of {name}",
        }[self.phase]

    @property
    def way(self) -> str:
        """The pass in which it appeared: forward, loss, backward or parameter."""
        return {"input": "forward", "gradient": "backward"}.get(self.phase, self.phase)

    @property
    def maker(self) -> str:
        """The module that computed it, as far as known, else `module`."""
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
    """The result of a replay.

    origin: None if everything was finite.
    losses: fp32 loss sums of the micro-batches up to and including the non-finite one, or of all.
    """

    origin: Origin | None
    losses: tuple[float, ...]


def largest_finite(tensor: torch.Tensor) -> float | None:
    """Return the largest finite magnitude; None if no element is finite."""
    if not tensor.numel():
        return None
    largest = max(abs(float(bound)) for bound in torch.aminmax(tensor))
    if math.isfinite(largest):  # avoid a copy: the tensor may be huge
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
    """Replay a non-finite step with its own random draws and find the origin. Collective: every rank must replay all of
    its micro-batches, because the passes contain collectives.

    weight, numbers: for a step of another process, its weight over all ranks and the `draw_number` of each micro-batch.
    look: whether to install hooks; without them the passes run exactly as in the step, compiled if the model is.
    """
    weight = step_size(engine, micro_batches)[0] if weight is None else weight
    numbers = [draw_number(engine, number) for number in range(len(micro_batches))] if numbers is None else numbers
    origin = None
    losses: list[float] = []
    try:
        for place, (batch, number) in enumerate(zip(micro_batches, numbers, strict=True)):
            seed_micro_batch(settings.seed, step, number)  # same dropout masks as in the step
            with settings.passes(step), _watch(engine.model) if look else nullcontext([]) as seen:
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
    """Return the rank with the most reliable origin, the lowest one among equals; the same on all ranks. Parameter
    gradients may already be reduced over ranks when they are checked, so they rank last. Collective."""
    places = [0.0] * engine.world
    places[engine.rank] = 1.0 + _PHASES.index(origin.phase) if origin else 0.0
    found = [(place, rank) for rank, place in enumerate(engine.totals(places)) if place]
    return min(found)[1] if found else None


def agreed_origin(engine: Engine, origin: Origin | None) -> str | None:
    """Describe the most reliable origin, with the same text on all ranks; None if there is none. Collective."""
    source = source_of(engine, origin)
    if source is None:
        return None
    text = f"on rank {source} {origin}" if engine.world > 1 else str(origin)
    return text_from(source, text, engine.ranks)


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the name of the module in whose forward pass an exception was raised, or its class if it is not part of
    `model` (such as a separate reference model); "" if it was raised outside of modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            found = names.get(id(own), type(own).__name__)
        trace = trace.tb_next
    return found


def _origin(engine: Engine, seen: Sequence[Origin], loss: torch.Tensor) -> Origin | None:
    """Find the origin in one micro-batch.

    seen: what the hooks recorded.
    loss: the loss sum.
    """
    if not torch.isfinite(loss) and not any(one.phase in ("forward", "input") for one in seen):
        return _sighting("loss", "loss", loss, "")
    if seen:
        return seen[0]
    for name, gradient in engine.gradients().items():  # overflow, although all activation gradients are finite
        if not torch.isfinite(gradient).all():
            return _sighting(name, "parameter", gradient, "")
    return None


def _sighting(module: str, phase: Phase, tensor: torch.Tensor, made_in: str) -> Origin:
    return Origin(module, phase, (), tensor=TensorFacts.of(tensor), made_in=made_in)


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[Origin]]:
    """Install hooks that collect the first non-finite value of the forward and of the backward pass, in this order.
    Submodules are checked before their parents."""
    watch = _Watch()
    named = [(name, module) for name, module in model.named_modules() if name]
    names = {module: name for name, module in named}
    # always_call: gradient checkpointing leaves a recomputed forward by an exception, once it has all it needs.
    handles = [module.register_forward_hook(watch.leaves(name), always_call=True) for name, module in named]
    handles += [module.register_forward_pre_hook(watch.enters(name), with_kwargs=True) for name, module in named]
    try:
        with eager_mode(model), watched_logits(model, lambda head, logits: watch.made(names[head], logits)):
            yield watch.seen
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """Hooks for one forward and backward pass.

    seen: the first non-finite value of the forward pass and that of the backward pass.
    """

    def __init__(self) -> None:
        self.seen: list[Origin] = []
        self._inside: list[str] = []  # modules whose forward is running, innermost last
        self._suspect: Origin | None = None  # a non-finite input; counts only if an output becomes non-finite
        self._forward = self._backward = False  # whether one was found in this pass
        self._callers: Any = WeakTensorKeyDictionary()  # output -> (its version, modules that received it)

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
        """Check an output of a module."""
        if not self._forward and not _is_finite(tensor):
            self._forward = True
            self.seen.append(self._suspect or _sighting(name, "forward", tensor, name))

    def _returns(self, name: str, tensor: torch.Tensor, caller: str) -> None:
        """Hook the gradient of an output. If a parent returns a submodule's output unchanged, the code that uses it is
        the parent's caller."""
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
    """Whether an argument is non-finite, except for attention masks, which hold -inf on purpose and need no
    gradient."""
    if _is_finite(tensor):
        return False
    return tensor.requires_grad or bool((tensor.isnan() | tensor.isposinf()).any())


def _is_finite(tensor: torch.Tensor) -> bool:
    # Detached: a recomputed layer must save the same number of tensors as the first time.
    return bool(torch.isfinite(tensor.detach()).all())


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to each floating-point tensor of a module's arguments, inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, change) for one in value)
    if type(value) is dict:
        return {name: _mapped(one, change) for name, one in value.items()}
    return value


def float_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a module's output, inside dicts, lists and tuples."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from float_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from float_tensors(value)
