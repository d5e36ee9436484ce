"""One language model that plays several parts: adapters by name over one base, of which one at a time is heard.

PPO needs an actor, a critic, a reference and a reward model. Where they have the same base, they are one trunk with an
adapter each, and memory holds the base once. PEFT can switch adapters too, but its `set_adapter` and `disable_adapter`
set requires_grad as well, so that the optimizer's parameters would stop training; here switching changes two attributes
of each adapted layer and nothing else.

    trunk = Trunk(add_adapter(model, plan, ...))            # the actor: PEFT's "default"
    trunk.add_copy("critic", trainable=True)
    trunk.add_saved("reward", fitted(read_adapter(folder), facts), trainable=False)
    with trunk.playing("critic"): ...                       # inside, the critic's adapter alone
    with trunk.playing(None): ...                           # the base

Gradient checkpointing computes a layer again in the backward pass, when another part may be playing. So every
checkpointed layer is computed again under the adapter of its own forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from surefoot.models.adapters import (
    ADAPTER,
    AdaptedLayer,
    adapted_layers,
    add_another,
    add_copy,
    leave_casts_to_autocast,
)
from surefoot.models.checkpointing import checkpointed_layers, enable_gradient_checkpointing
from surefoot.models.peft import LoraLayer, PeftModel
from surefoot.models.saved_adapter import SavedAdapter, add_saved
from surefoot.planning.plan import AdapterPlan


class Trunk:
    """model: with its first adapter, and with gradient checkpointing already on where it is wanted. now: the adapter
    that is heard, None where it is the base alone."""

    def __init__(self, model: PeftModel):
        self.model = model
        self.now: str | None = ADAPTER
        self._layers = adapted_layers(model)
        if again := checkpointed_layers(model):
            enable_gradient_checkpointing(model, again, recompute_in=lambda: _Again(self, self.now))

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.model.peft_config)

    @contextmanager
    def playing(self, adapter: str | None) -> Iterator[None]:
        """Inside, this adapter alone is heard, or the base (None); afterwards what was heard before, also after an
        error. Can be nested. A layer that the adapter does not have plays its base. requires_grad, dropout and
        training mode stay as they are. Raises KeyError for an unknown adapter."""
        if adapter is not None and adapter not in self.adapters:
            raise KeyError(f"no adapter {adapter!r} among {', '.join(self.adapters)}")
        before = self.now
        states = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        self._hear(adapter)
        try:
            yield
        finally:
            self.now = before
            for layer, (active, disabled) in zip(self._layers, states, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def add_copy(self, name: str, *, like: str = ADAPTER, trainable: bool) -> None:
        """Another adapter on the same modules, that starts bit for bit as `like` is now. trainable: whether it is to
        learn, whatever `like` does."""
        with self._adding(name, trainable):
            add_copy(self.model, name, like)

    def add_new(self, name: str, plan: AdapterPlan, *, seed: int, trainable: bool) -> None:
        """Another adapter of a shape of its own, at its start. Raises InputError where it does not fit."""
        with self._adding(name, trainable):
            add_another(self.model, name, plan, seed=seed)

    def add_saved(self, name: str, saved: SavedAdapter, *, trainable: bool) -> None:
        """The adapter of a folder, over modules of its own choice, in fp32. Raises InputError where it does not fit."""
        with self._adding(name, trainable):
            add_saved(self.model, saved, name)

    def parameters_of(self, adapter: str) -> frozenset[str]:
        """Names, as in `model.named_parameters()`, of everything that belongs to the adapter."""
        own = {id(parameter) for parameter in self._parameters(adapter)}
        return frozenset(name for name, parameter in self.model.named_parameters() if id(parameter) in own)

    @contextmanager
    def _adding(self, name: str, trainable: bool) -> Iterator[None]:
        """PEFT freezes and unfreezes other adapters when it adds one, makes it in training mode and hears all."""
        before = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        leaves_casts = any(isinstance(one, LoraLayer) and not one.cast_input_dtype_enabled for one in self._layers)
        yield
        self._layers = adapted_layers(self.model)
        for parameter, trains in before:
            parameter.requires_grad = trains
        for parameter in self._parameters(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad = trainable
        if leaves_casts:
            leave_casts_to_autocast(self.model)
        self.model.train(self.model.training)
        self._hear(self.now)

    def _parameters(self, adapter: str) -> Iterator[nn.Parameter]:
        for layer in self._layers:
            for part in _parts(layer, adapter):
                yield from [part] if isinstance(part, nn.Parameter) else part.parameters()

    def _hear(self, adapter: str | None) -> None:
        self.now = adapter
        for layer in self._layers:
            if adapter is not None and any(True for _ in _parts(layer, adapter)):
                layer._active_adapter, layer._disable_adapters = [adapter], False
            else:
                layer._disable_adapters = True


class _Again:
    """The adapter of a forward pass, as a context that can be entered for each of several backward passes."""

    def __init__(self, trunk: Trunk, adapter: str | None):
        self._trunk, self._adapter = trunk, adapter
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._trunk.playing(self._adapter))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


def _parts(layer: AdaptedLayer, adapter: str) -> Iterator[nn.Module | nn.Parameter]:
    for name in layer.adapter_layer_names:
        group = getattr(layer, name)
        if adapter in group:
            yield group[adapter]
