"""Optimizers over named parameters, and learning rate schedules as pure functions of the step.

Weight decay applies to matrices only, not to biases, norms and DoRA magnitudes. Muon and 8-bit AdamW take the matrices
inside the decoder layers and leave embeddings, head and vectors to AdamW: orthogonalizing an embedding makes no sense,
and its rare, large gradients suffer most from 8-bit moments. The learning rate is set before each step, so every
optimizer is constructed with lr 0.

    adamw       Loshchilov & Hutter 2019, torch's fused implementation
    adamw_8bit  Dettmers et al. 2022, bitsandbytes: 8-bit moments with one scale per 256 elements
    adafactor   Shazeer & Stern 2018, transformers' implementation with an external learning rate
    rmsprop     Hinton 2012, torch's, with its decay of 0.99 for the second moment
    sgd         torch's, as rmsprop with weight decay added to the gradient
    muon        Jordan et al. 2024, torch's; the update is scaled to the size of AdamW's (Liu et al. 2025), so that one
                learning rate fits both parts

Schedules: steps count from 0. During warm-up the rate rises linearly and reaches its peak at step `warmup`. The first
step has a rate above 0, unless `from_zero` is set, as in transformers. Then, with
p = (step - warmup) / (total - warmup):

    constant  peak
    linear    peak * (1 - p)
    cosine    peak * (1 + cos(pi p)) / 2
    wsd       peak, then linearly towards 0 over the last `decay` steps

Pure functions of the step have no state to save, so nothing can drift on resume.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import nn

from surefoot.system.libraries import import_bitsandbytes

Name = Literal["adamw", "adamw_8bit", "adafactor", "rmsprop", "sgd", "muon"]
Parameters = Mapping[str, nn.Parameter]
MUON_MOMENTUM = 0.95  # the paper's, and torch's default


class Optimizer(Protocol):
    """The part of torch.optim.Optimizer that engines use.

    state: parameter -> its state entries.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, Any]

    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer hyperparameters, except the learning rate.

    momentum: momentum of rmsprop, sgd and muon; None takes the optimizer's default.
    """

    name: Name
    betas: tuple[float, float]
    momentum: float | None
    eps: float
    weight_decay: float


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter for those that require a gradient; tied parameters appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(parameters: Parameters, settings: OptimizerSettings, *, decoder: Collection[str]) -> Optimizer:
    """Make an optimizer over all `parameters`.

    decoder: names of the matrices inside the decoder layers.
    """
    return _MAKERS[settings.name](parameters, settings, decoder)


def make_optimizers(
    groups: Mapping[str, Parameters],
    settings: Mapping[str, OptimizerSettings],
    *,
    decoder: Collection[str],
    factors: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """Make one optimizer over named parameter groups; each entry of its `param_groups` has its group's `name`.

    factors: parameter -> its rate as a multiple of its group's, which becomes `factor` of its entry.
    """
    parts = []
    for name, parameters in groups.items():
        own = {id(parameter): factors[key] for key, parameter in parameters.items() if key in factors}
        for part in parts_of(make_optimizer(parameters, settings[name], decoder=decoder)):
            part.param_groups = [one for group in part.param_groups for one in _by_factor(group, own)]
            for group in part.param_groups:
                group["name"] = name
            parts.append(part)
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _by_factor(group: Mapping[str, Any], factors: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Split a param group by the factors of its parameters. factors: id of a parameter -> its own."""
    members: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in group["params"]:
        members[factors.get(id(parameter), 1.0)].append(parameter)
    for factor, parameters in members.items():
        yield {**group, "params": parameters, **({"factor": factor} if factor != 1.0 else {})}


def adamw(parameters: Parameters, *, betas: tuple[float, float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """Make a fused AdamW with learning rate 0."""
    return torch.optim.AdamW(_groups(parameters, weight_decay), lr=0.0, betas=betas, eps=eps, fused=True)


class CombinedOptimizer:
    """Several optimizers over disjoint parameters behind the interface of one, with a shared `state`."""

    def __init__(self, parts: Sequence[Optimizer]):
        self._parts = [leaf for part in parts for leaf in parts_of(part)]
        self.param_groups: list[dict[str, Any]] = [group for part in parts for group in part.param_groups]
        self.state: defaultdict[torch.Tensor, Any] = self._parts[0].state
        for part in self._parts[1:]:
            # One dict, so that checkpoints save and load the state by parameter, whichever part steps it.
            part.state = self.state

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the library optimizers of which `optimizer` consists."""
    return list(optimizer._parts) if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _adamw(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    return adamw(parameters, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)


def _adamw_8bit(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    def in_8_bits(chosen: Parameters) -> torch.optim.Optimizer:
        make = import_bitsandbytes().optim.AdamW8bit
        return make(_groups(chosen, settings.weight_decay), lr=0.0, betas=settings.betas, eps=settings.eps)

    return _with_adamw(parameters, settings, decoder, in_8_bits)


def _adafactor(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    from transformers.optimization import Adafactor

    # torch.optim.Adafactor always multiplies the update by max(RMS of the parameter, 0.001): a LoRA B, which starts at
    # zero, would be updated at a thousandth of the learning rate.
    groups = _groups(parameters, settings.weight_decay)
    return Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False, warmup_init=False)


def _rmsprop(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    groups = _groups(parameters, settings.weight_decay)
    return torch.optim.RMSprop(groups, lr=0.0, eps=settings.eps, momentum=settings.momentum or 0.0)


def _sgd(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    groups = _groups(parameters, settings.weight_decay)
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum or 0.0)


def _muon(parameters: Parameters, settings: OptimizerSettings, decoder: Collection[str]) -> Optimizer:
    def orthogonal(chosen: Parameters) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            list(chosen.values()),
            lr=0.0,
            weight_decay=settings.weight_decay,
            momentum=MUON_MOMENTUM if settings.momentum is None else settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    return _with_adamw(parameters, settings, decoder, orthogonal)


_MAKERS: dict[Name, Callable[[Parameters, OptimizerSettings, Collection[str]], Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "muon": _muon,
}


def _with_adamw(
    parameters: Parameters,
    settings: OptimizerSettings,
    decoder: Collection[str],
    make: Callable[[Parameters], torch.optim.Optimizer],
) -> Optimizer:
    """Use `make` for the decoder's matrices and AdamW for the rest, or only one of them if the other has none."""
    inside = {name: parameter for name, parameter in parameters.items() if name in decoder}
    rest = {name: parameter for name, parameter in parameters.items() if name not in decoder}
    # torch's optimizers refuse an empty list of parameters.
    if not inside:
        return _adamw(rest, settings, decoder)
    if not rest:
        return make(inside)
    return CombinedOptimizer(
        [make(inside), adamw(rest, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)]
    )


def _groups(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Make param groups: matrices with weight decay, vectors without."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return [
        {"params": tensors, "weight_decay": decay}
        for tensors, decay in ((matrices, weight_decay), (vectors, 0.0))
        if tensors
    ]


INVERSE_SQRT_STEPS = 10_000  # transformers' time scale without a warm-up
_AFTER_WARMUP: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
}


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule.

    kind: cosine | linear | constant | wsd | inverse_sqrt.
    peak: highest learning rate.
    total, warmup, decay: optimizer steps.
    from_zero: whether the warm-up starts at rate 0.
    floor: cosine and linear: fraction of the peak at which they end.
    """

    kind: str
    peak: float
    total: int
    warmup: int
    decay: int = 0
    from_zero: bool = False
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step / self.warmup if self.from_zero else (step + 1) / (self.warmup + 1))
        if self.kind == "wsd":
            # + 1: the last step still learns, at peak / (decay + 1).
            return self.peak * min(1.0, (self.total - step) / (self.decay + 1))
        if self.kind == "inverse_sqrt":
            return self.peak / math.sqrt(1 + (step - self.warmup) / (self.warmup or INVERSE_SQRT_STEPS))
        share = _AFTER_WARMUP[self.kind]((step - self.warmup) / max(1, self.total - self.warmup))
        return self.peak * (self.floor + (1 - self.floor) * share)
