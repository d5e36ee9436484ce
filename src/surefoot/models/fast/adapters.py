"""LoRA and DoRA in PEFT models, computed with `surefoot.kernels.adapters`.

Parameters, names and files remain PEFT's. An adapted layer gets another `forward`, which reads PEFT's parameters and
falls back to PEFT's own forward in unsupported cases (several adapters at once, merged weights, a quantized base,
variants of LoRA other than DoRA).

Layers with a common input are found with one forward pass at installation, which records which layers get the same
tensor. The first of them that is called computes the outputs of all, and the others return theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.pytorch_utils import Conv1D

from surefoot.kernels.adapters import Layers, Projection, adapted
from surefoot.kernels.dora import Factor, factored_norms, factors_of, row_squares
from surefoot.models.fast import FastPath, Undo, experts, give_forwards
from surefoot.models.forward import language_models, short_pass
from surefoot.models.peft import DoraLinearLayer, LoraLinear, ParamWrapper


def adapter_path() -> FastPath:
    return FastPath("adapter", install)


def install(model: nn.Module) -> Undo:
    """Give every adapted linear layer and all adapted experts in `model` the fast forward. Parameters must not be
    sharded when it runs."""
    clock = _Clock()
    factors = _Factors(clock)
    slots = [
        _Slot(layer) for layer in model.modules() if isinstance(layer, LoraLinear | ParamWrapper) and _takes(layer)
    ]
    groups = [_Group(members, clock, factors) for members in _sharing(model, slots)]
    for group in groups:
        for slot in group.slots:
            slot.group = group
    undo_forwards, undo_experts = give_forwards(slots), experts.install(model)

    def undo() -> None:
        undo_experts()
        clock.stop()
        undo_forwards()

    return undo


class _Clock:
    """Counts optimizer steps, to invalidate values computed from parameters. Tensor versions are not enough: fused
    AdamW does not increment them."""

    def __init__(self) -> None:
        self.now = 0
        self._hook = register_optimizer_step_post_hook(self._tick)

    def stop(self) -> None:
        self._hook.remove()

    def _tick(self, *_: Any) -> None:
        self.now += 1

    def state(self, adapter: _Adapter) -> Any:
        """Return a key that changes when the adapter's weights change."""
        return self.now, adapter.scale, *((one.data_ptr(), one._version) for one in adapter.parameters)


@dataclass(frozen=True)
class _Adapter:
    """The only active adapter of a layer.

    drops: whether `dropout` is active.
    """

    name: str
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None
    scale: float
    dropout: nn.Module
    drops: bool

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]


class _Slot:
    """A layer with its fast forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, module: LoraLinear | ParamWrapper):
        self.module = module
        self.plain = module.forward
        self.group: _Group
        self.squares: torch.Tensor | None = None  # squared row norms of the frozen weight

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ready = None if args or kwargs else self.group.output(self, x)
        return self.plain(x, *args, **kwargs) if ready is None else ready

    @property
    def weight(self) -> torch.Tensor:
        """The weight [O, I]; Conv1D stores it transposed."""
        base = self.module.get_base_layer()
        weight = base.get_parameter("weight")
        return weight.T if isinstance(base, Conv1D) else weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.module.get_base_layer().bias  # pyright: ignore[reportReturnType]

    def adapter(self, x: torch.Tensor) -> _Adapter | None:
        """Return the active adapter; None if PEFT's own forward must run."""
        layer = self.module
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        if layer.disable_adapters or layer.merged or len(names) != 1 or not self._is_frozen():
            return None
        name = names[0]
        a, b = layer.lora_A[name], layer.lora_B[name]
        assert isinstance(a, nn.Linear)
        assert isinstance(b, nn.Linear)
        magnitude = None
        if name in layer.lora_variant:
            magnitude = _magnitude(layer.lora_magnitude_vector, name)
            if magnitude is None:
                return None
        one_type = x.dtype == self.weight.dtype == a.weight.dtype
        if b.bias is not None or not (one_type or torch.is_autocast_enabled(x.device.type)):
            return None
        dropout = layer.lora_dropout[name]
        drops = isinstance(dropout, nn.Dropout) and layer.training and dropout.p > 0
        return _Adapter(name, a.weight, b.weight, magnitude, layer.scaling[name], dropout, drops)

    def _is_frozen(self) -> bool:
        return not any(one is not None and one.requires_grad for one in (self.weight, self.bias))


def _magnitude(vectors: nn.ModuleDict, name: str) -> nn.Parameter | None:
    """Return DoRA's m; None for other variants of LoRA."""
    if name not in vectors or type(vectors[name]) is not DoraLinearLayer:
        return None
    return vectors[name].get_parameter("weight")


class _Group:
    """Layers that get the same input tensor, in the order of their calls."""

    def __init__(self, slots: list[_Slot], clock: _Clock, factors: _Factors):
        self.slots = slots
        self._clock = clock
        self._factors = factors
        self._input: torch.Tensor | None = None
        self._ready: dict[_Slot, torch.Tensor] = {}
        self._made: dict[Any, tuple[Any, _Made]] = {}

    def output(self, slot: _Slot, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's output; None if PEFT's own forward must run."""
        if self._input is x and slot in self._ready:
            found = self._ready.pop(slot)
            if not self._ready:
                self._input = None
            return found
        self._input, self._ready = None, {}  # outputs left by another pass must not be used in this one
        on = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if on else x.dtype
        active = {one: one.adapter(x) for one in self.slots[self.slots.index(slot) :]}
        adapters = {one: adapter for one, adapter in active.items() if adapter is not None}
        if slot not in adapters:
            return None
        if any(adapter.drops for adapter in adapters.values()):
            # One layer at a time, so that masks are drawn from the generator in the same order as in PEFT.
            adapters = {slot: adapters[slot]}
        first, *others = self._compute(adapters, x, dtype)
        if others:
            self._input, self._ready = x, dict(zip(list(adapters)[1:], others, strict=True))
        return first

    def _compute(
        self, adapters: dict[_Slot, _Adapter], x: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        made = self._current(adapters, dtype)
        dropped, kept = None, 1.0
        [*_, last] = adapters.items()
        if last[1].drops:
            dropped, kept = _draw(last[0].module, last[1], x)
        projections = tuple(
            # Detached: gradients reach B through the parameters of `adapted`, and not a second time through here.
            Projection(slot.weight, slot.bias, adapter.b.detach(), adapter.scale, up, factor)
            for (slot, adapter), up, factor in zip(adapters.items(), made.up, made.factors, strict=True)
        )
        layers = Layers(projections, made.down, made.stacked, dropped, kept)
        return adapted(layers, x, [one for adapter in adapters.values() for one in adapter.parameters])

    def _current(self, adapters: dict[_Slot, _Adapter], dtype: torch.dtype) -> _Made:
        """Return the values computed from the weights alone; recompute them if the weights have changed."""
        place = (dtype, *((id(slot), adapter.name) for slot, adapter in adapters.items()))
        state = tuple(self._clock.state(adapter) for adapter in adapters.values())
        known = self._made.get(place)
        if known is None or known[0] != state:
            known = state, _make(adapters, dtype, self._factors)
            self._made[place] = known
        return known[1]


@dataclass(frozen=True)
class _Made:
    """Values computed from the weights alone, see `Layers` and `Projection`."""

    down: tuple[torch.Tensor, ...]
    stacked: torch.Tensor
    up: tuple[torch.Tensor, ...]
    factors: tuple[Factor | None, ...]


@torch.no_grad()
def _make(adapters: dict[_Slot, _Adapter], dtype: torch.dtype, known: _Factors) -> _Made:
    with torch.autocast(next(iter(adapters.values())).a.device.type, enabled=False):
        stacked = torch.cat([adapter.a.to(dtype) for adapter in adapters.values()])
        factors = [known.of(slot, adapter, dtype) for slot, adapter in adapters.items()]
        ups = [_up(adapter, dtype) for adapter in adapters.values()]
        down = stacked.split([len(adapter.a) for adapter in adapters.values()])
    return _Made(tuple(down), stacked, tuple(ups), tuple(factors))


def _up(adapter: _Adapter, dtype: torch.dtype) -> torch.Tensor:
    return (adapter.b * adapter.scale).to(dtype)


_Place = tuple[_Slot, str, torch.dtype]  # layer, adapter name, compute dtype


@dataclass
class _Known:
    """A cached factor. state: `_Clock.state` when it was made; used: whether it was used since then."""

    adapter: _Adapter
    state: Any
    factor: Factor
    used: bool = False


class _Factors:
    """Cache of DoRA's factors of all layers. After a weight update, the first request recomputes all factors that were
    used since the previous update, so that host and device synchronize once per step instead of once per layer."""

    def __init__(self, clock: _Clock):
        self._clock = clock
        self._known: dict[_Place, _Known] = {}

    def of(self, slot: _Slot, adapter: _Adapter, dtype: torch.dtype) -> Factor | None:
        """Return a layer's factor; None for LoRA."""
        if adapter.magnitude is None:
            return None
        place = slot, adapter.name, dtype
        known = self._known.get(place)
        if known is None or known.state != self._clock.state(adapter):
            self._renew(place, adapter)
            known = self._known[place]
        known.used = True
        return known.factor

    def _renew(self, place: _Place, adapter: _Adapter) -> None:
        outdated = {place: adapter}
        for other, known in list(self._known.items()):
            if known.state != self._clock.state(known.adapter):
                del self._known[other]
                if known.used:
                    outdated.setdefault(other, known.adapter)
        states = [self._clock.state(one) for one in outdated.values()]
        factors = factors_of([_parts(slot, one, dtype) for (slot, _, dtype), one in outdated.items()])
        for (at, one), state, factor in zip(outdated.items(), states, factors, strict=True):
            self._known[at] = _Known(one, state, factor)


def _parts(slot: _Slot, adapter: _Adapter, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the inputs of `factors_of` for one layer."""
    assert adapter.magnitude is not None
    if slot.squares is None:
        slot.squares = row_squares(slot.weight)
    norm = factored_norms(slot.weight.to(dtype), slot.squares, adapter.a, adapter.b, adapter.scale)
    return adapter.magnitude, norm, dtype


def _draw(layer: LoraLinear | ParamWrapper, adapter: _Adapter, x: torch.Tensor) -> tuple[tuple[torch.Tensor], float]:
    """Draw the mask of PEFT's dropout, from the same random numbers; also return the factor for kept elements."""
    seen = adapter.a.dtype if layer.cast_input_dtype_enabled else x.dtype
    noise = adapter.dropout(torch.ones_like(x, dtype=seen, requires_grad=False))
    return (noise == 0,), 1 / (1 - adapter.dropout.p)  # pyright: ignore[reportReturnType, reportOperatorIssue]


def _takes(layer: LoraLinear | ParamWrapper) -> bool:
    """Whether the layer wraps a plain linear layer of torch or transformers (also a ParamWrapper may, see
    `surefoot.models.adapter_targets`)."""
    # Exact types: quantized linear layers are subclasses of torch's with another product.
    return type(layer) in (LoraLinear, ParamWrapper) and type(layer.get_base_layer()) in (nn.Linear, Conv1D)


def _sharing(model: nn.Module, slots: list[_Slot]) -> list[list[_Slot]]:
    """Group the slots that are called consecutively with the same tensor; each slot is in exactly one group."""
    of: dict[nn.Module, _Slot] = {slot.module: slot for slot in slots}
    groups: list[list[_Slot]] = []
    with _watching(of) as calls:
        for language_model in language_models(model):
            short_pass(language_model)
    seen: set[_Slot] = set()
    before: torch.Tensor | None = None
    for slot, given in calls:
        if slot in seen:
            continue
        if given is before:
            groups[-1].append(slot)
        else:
            groups.append([slot])
        seen.add(slot)
        before = given
    return [*groups, *([slot] for slot in slots if slot not in seen)]


@contextmanager
def _watching(of: dict[nn.Module, _Slot]) -> Iterator[list[tuple[_Slot, torch.Tensor]]]:
    """Record (slot, input) of every call. All tensors are kept alive, so that identity comparisons are reliable."""
    calls: list[tuple[_Slot, torch.Tensor]] = []

    def hook(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs:
            calls.append((of[layer], inputs[0]))

    handles = [layer.register_forward_pre_hook(hook) for layer in of]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
