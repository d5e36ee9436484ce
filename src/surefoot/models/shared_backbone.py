"""Several adapters on one frozen base model, one of them active at a time.

PPO needs an actor, a critic, a reference and a reward model. If they have the same base, they share one backbone with
an adapter each, so the base is in memory once. PEFT can switch adapters too, but its `set_adapter` and
`disable_adapter` also set requires_grad, so parameters of the optimizer would stop training; here switching changes
only two attributes of each adapted layer.

    backbone = SharedBackbone(add_adapter(model, plan, ...))    # the actor: PEFT's "default"
    backbone.add_copy("critic", trainable=True)
    backbone.add_saved("reward", fitted(read_adapter(folder), facts), trainable=False)
    with backbone.use_adapter("critic"): ...                    # inside, the critic's adapter alone
    with backbone.use_adapter(None): ...                        # the base

Gradient checkpointing recomputes a layer in the backward pass, when another adapter may be active. So every
checkpointed layer is recomputed with the adapter of its forward pass.
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


class SharedBackbone:
    """A PEFT model whose adapters can be switched without changing requires_grad.

    model: PEFT model with its first adapter; gradient checkpointing must be enabled before, if it is wanted.
    active: name of the adapter that the forward pass uses; None for the base alone.
    """

    def __init__(self, model: PeftModel):
        self.model = model
        self.active: str | None = ADAPTER
        self._layers = adapted_layers(model)
        if again := checkpointed_layers(model):
            enable_gradient_checkpointing(model, again, recompute_in=lambda: _AdapterAgain(self, self.active))

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.model.peft_config)

    @contextmanager
    def use_adapter(self, adapter: str | None) -> Iterator[None]:
        """Context in which the forward pass uses only this adapter; afterwards the previous one is restored. Can be
        nested. Does not change requires_grad, dropout and training mode. Raises KeyError for an unknown name.

        adapter: adapter name; None for the base. Layers without this adapter use the base.
        """
        if adapter is not None and adapter not in self.adapters:
            raise KeyError(f"no adapter {adapter!r} among {', '.join(self.adapters)}")
        before = self.active
        states = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        self._activate(adapter)
        try:
            yield
        finally:
            self.active = before
            for layer, (active, disabled) in zip(self._layers, states, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def add_copy(self, name: str, *, trainable: bool) -> None:
        """Add an adapter on the same modules, initialized as a bit-identical copy of the policy's.

        trainable: whether the copy's parameters require gradients.
        """
        with self._adding(name, trainable):
            add_copy(self.model, name, ADAPTER)

    def add_new(self, name: str, plan: AdapterPlan, *, seed: int, trainable: bool) -> None:
        """Add a newly initialized adapter with its own rank and targets. Raises InputError if it does not fit."""
        with self._adding(name, trainable):
            add_another(self.model, name, plan, seed=seed)

    def add_saved(self, name: str, saved: SavedAdapter, *, trainable: bool) -> None:
        """Add a saved adapter with its own targets, in fp32. Raises InputError if it does not fit."""
        with self._adding(name, trainable):
            add_saved(self.model, saved, name)

    def parameters_of(self, adapter: str) -> frozenset[str]:
        """Return the names, as in `model.named_parameters()`, of the adapter's parameters."""
        own = {id(parameter) for parameter in self._parameters(adapter)}
        return frozenset(name for name, parameter in self.model.named_parameters() if id(parameter) in own)

    @contextmanager
    def _adding(self, name: str, trainable: bool) -> Iterator[None]:
        """Undo PEFT's side effects of adding an adapter: requires_grad of others, training mode, active adapters."""
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
        # PEFT leaves a new adapter's modules in training mode, whatever the model's.
        self.model.train(self.model.training)
        self._activate(self.active)

    def _parameters(self, adapter: str) -> Iterator[nn.Parameter]:
        for layer in self._layers:
            for part in _parts(layer, adapter):
                yield from [part] if isinstance(part, nn.Parameter) else part.parameters()

    def _activate(self, adapter: str | None) -> None:
        self.active = adapter
        for layer in self._layers:
            if adapter is not None and any(True for _ in _parts(layer, adapter)):
                layer._active_adapter, layer._disable_adapters = [adapter], False
            else:
                layer._disable_adapters = True


class _AdapterAgain:
    """Context with the adapter of a forward pass, which can be entered for each of several backward passes."""

    def __init__(self, backbone: SharedBackbone, adapter: str | None):
        self._backbone, self._adapter = backbone, adapter
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._backbone.use_adapter(self._adapter))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


def _parts(layer: AdaptedLayer, adapter: str) -> Iterator[nn.Module | nn.Parameter]:
    for name in layer.adapter_layer_names:
        group = getattr(layer, name)
        if adapter in group:
            yield group[adapter]
