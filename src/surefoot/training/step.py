"""The one optimizer step.

SFT, and every other method, runs this function. Losses arrive as sums and are divided by the weight of the whole step
(supervised tokens, pairs, response tokens), over all micro-batches and ranks. So the split never changes the result.

Every random draw is a function of (seed, step, micro-batch, rank): reseeding before each micro-batch costs microseconds
and removes the saved generator states, and with them the whole family of "resumed, but with other dropout masks"
faults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from surefoot.data.batching.batch import Weighted
from surefoot.training import optimizer_state
from surefoot.training.engine import Engine, PerGroup
from surefoot.training.engine.base import of_group
from surefoot.training.guard import judge
from surefoot.training.objective import Objective
from surefoot.training.profile import Stopwatch, Watch, named, unwatched
from surefoot.training.report import Load, StepReport
from surefoot.training.routing import AUX_LOSS, Balance, Routing, aux_loss, spread
from surefoot.training.state import LossScale

LOSS = "loss"
Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepSettings:
    """What stays the same from step to step.

    seed: of the run.
    max_grad_norm: of every group of parameters, or of each its own; None does not clip.
    forward: autocast as planned.
    kernels: the attention kernels allowed, around forward and backward.
    bounds: by the name of a sum of the objective, its largest mean with which a step may move the weights.
    per_look: tokens between two looks at the moments, see `optimizer_state.look_is_due`.
    after_step: called when the weights have moved; it changes no number.
    routing: of a mixture of experts; None elsewhere.
    """

    seed: int
    max_grad_norm: PerGroup[float | None]
    forward: Context
    kernels: Context
    bounds: Mapping[str, float] = field(default_factory=dict)
    per_look: float = 0.0
    after_step: Callable[[], None] = lambda: None
    routing: Routing | None = None


def train_step(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    lr: PerGroup[float],
    scale: LossScale | None,
    settings: StepSettings,
    ceiling: float | None = None,
    watch: Watch = unwatched,
) -> StepReport:
    """Run one optimizer step and report it.

    micro_batches: this rank's; every rank has as many.
    step: its number, from 1.
    lr: of every group of parameters, or of each its own.
    scale: fp16 loss scale, None otherwise.
    ceiling: a gradient whose norm over all groups is above it is scaled down to it.
    watch: times its parts, and changes no number.

    The optimizer moves only when the loss, all gradient norms and, in a step that looks at them, all moments are finite
    and no bound is passed, on all ranks or on none; a step without weight moves nothing and computes nothing. Here the
    host waits for the device once: where the guard looks. The passes have waits of their own: the places that are
    supervised, transformers' look at padding, and once in a step DoRA's factors (`models.fast.adapters`).
    """
    started = time.perf_counter()
    weight, tokens = step_size(engine, micro_batches)
    begun = partial(
        StepReport,
        step=step,
        lr=next(iter(lr.values())) if isinstance(lr, Mapping) else lr,
        weight=weight,
        tokens=tokens,
        examples=tuple(number for batch in micro_batches for number in batch.examples),
        scale=None if scale is None else scale.scale,
    )
    if weight == 0:
        seconds, held = time.perf_counter() - started, "nothing to learn from"
        return begun(loss=None, grad_norm=None, decision="held", non_finite=None, seconds=seconds, held=held)
    sums = accumulate_gradients(
        engine, objective, micro_batches, weight=weight, step=step, scale=scale, settings=settings, watch=watch
    )
    with watch("optimizer"):
        # In this order norms are of the whole step's gradients, of all ranks and without the fp16 scale. The guard and
        # clipping use the same norms, so that what was judged is what moves the weights.
        engine.reduce()
        engine.unscale(scale)
        norms = engine.grad_norms()
        due = optimizer_state.look_is_due(step, tokens, settings.per_look)
        seen = _look(engine, sums, norms, weight, engine.moments() if due else {})
        can_fall = scale is not None and scale.can_fall
        decision, non_finite = judge(seen.loss, seen.grad_norm, can_fall, bad_moment=bool(seen.bad_moment))
        held = _bound_passed(seen.metrics, settings.bounds)
        decision = "held" if held else decision
        spike = ceiling if ceiling is not None and decision == "stepped" and seen.grad_norm > ceiling else None
        if decision == "stepped":
            share = 1.0 if spike is None else spike / seen.grad_norm
            engine.apply(lr, norms, _limits(settings.max_grad_norm, seen.norms, share))
        else:
            engine.discard()  # before the next backward pass, which would add to gradients that are not finite
    settings.after_step()
    load = _loads(engine, settings.routing) if settings.routing else {}
    report = begun(
        loss=None if non_finite == "loss" else seen.loss,
        grad_norm=seen.grad_norm if non_finite in (None, "moment") else None,
        decision=decision,
        non_finite=non_finite,
        seconds=time.perf_counter() - started,
        metrics={**seen.metrics, **spread(load), **_by_group(lr, seen.norms)},
        load=load,
        held=held,
        spike=spike,
        moment=seen.bad_moment,
    )
    if isinstance(watch, Stopwatch):
        return replace(report, profile=watch.profile(tokens))
    return replace(report, traced=True) if watch is named else report


def _loads(engine: Engine, routing: Routing) -> Load:
    """Of all ranks, which must all ask."""
    own = routing.take()
    totals = iter(engine.totals([number for counts in own.values() for number in counts]))
    return {name: tuple(int(next(totals)) for _ in counts) for name, counts in own.items()}


@dataclass(frozen=True)
class _Seen:
    """What decides whether the weights move, on the host and the same on all ranks.

    loss, metrics: means over the step.
    norms: of each group's gradients, before clipping.
    bad_moment: the one of the optimizer that is not finite.
    """

    loss: float
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    bad_moment: str

    @property
    def grad_norm(self) -> float:
        """Over all groups."""
        return math.hypot(*self.norms.values())


def _look(
    engine: Engine,
    sums: Mapping[str, torch.Tensor],
    norms: Mapping[str, torch.Tensor],
    weight: int,
    moments: Mapping[str, torch.Tensor],
) -> _Seen:
    """Bring to the host what decides; here it waits for the device. Metrics are finite where the loss is.

    sums: this rank's, loss first.
    norms: of all ranks, by group.
    weight: of the whole step.
    moments: those that are looked at; none where that would take too large a part of this step's time.
    """
    means = [total / weight for total in sums.values()]
    looked = optimizer_state.look_at_moments(moments.values(), engine.device)
    numbers = torch.stack((looked, *means, *(norm.float() for norm in norms.values()))).tolist()
    own, of_groups = numbers[: 1 + len(means)], numbers[1 + len(means) :]
    finite, loss, *others = engine.totals(own)
    return _Seen(
        loss,
        dict(zip(list(sums)[1:], others, strict=True)),
        dict(zip(norms, of_groups, strict=True)),
        "" if math.isfinite(finite) else _bad_moment(engine),
    )


def _bad_moment(engine: Engine) -> str:
    """Which one is not finite, in the words of all ranks, which must all ask; empty where a sum of finite ones
    overflowed."""
    own = optimizer_state.first_bad_moment(engine.moments())
    found = engine.totals([float(bool(own))])[0]
    return own or ("one of another rank" if found else "")


def _limits(limits: PerGroup[float | None], norms: Mapping[str, float], share: float) -> PerGroup[float | None]:
    """Of every group: what it is clipped to anyway, or this share of its norm where that is less."""
    if share == 1.0:
        return limits
    found: dict[str, float | None] = {}
    for name, norm in norms.items():
        limit = of_group(limits, name)
        found[name] = share * norm if limit is None else min(limit, share * norm)
    return found


def _bound_passed(metrics: Mapping[str, float], bounds: Mapping[str, float]) -> str:
    """The first metric above its bound, in words; empty where there is none."""
    for name, bound in bounds.items():
        if (value := metrics.get(name, 0.0)) > bound:
            return f"{name.replace('_', ' ')} {value:.4g} is above {bound:g}"
    return ""


def step_size(engine: Engine, micro_batches: Sequence[Weighted]) -> tuple[int, int]:
    """Weight and real input tokens of all micro-batches of all ranks. Every rank must call it."""
    own = (sum(batch.weight for batch in micro_batches), sum(batch.tokens for batch in micro_batches))
    weight, tokens = engine.totals(own)
    return int(weight), int(tokens)


def accumulate_gradients(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    weight: int,
    step: int,
    scale: LossScale | None,
    settings: StepSettings,
    watch: Watch = unwatched,
) -> dict[str, torch.Tensor]:
    """Forward and backward of this rank's micro-batches; returns the sums over them, loss first, detached fp32 scalars
    on the device.

    weight: of the whole step, over all ranks.
    """
    sums = {LOSS: torch.zeros((), dtype=torch.float32, device=engine.device)}
    balance = None
    if settings.routing:
        settings.routing.take()  # drops what passes between two steps counted, such as trials
    if settings.routing and settings.routing.coefficient:
        with watch("forward"):
            balance = _balance(engine, objective, micro_batches, step=step, settings=settings, routing=settings.routing)
    for number, batch in enumerate(micro_batches):
        # Here and not once a step: the masks of a micro-batch do not depend on how many came before it on this rank.
        seed_micro_batch(settings.seed, step, draw_number(engine, number))
        found = add_gradient(
            engine, objective, batch, weight=weight, scale=scale, settings=settings, watch=watch, balance=balance
        )
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _balance(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Weighted],
    *,
    step: int,
    settings: StepSettings,
    routing: Routing,
) -> Balance:
    """How the step's tokens are routed, over all micro-batches and ranks: with the draws that its own passes will have,
    and without moving anything."""
    own: list[float] = []
    for number, batch in enumerate(micro_batches):
        seed_micro_batch(settings.seed, step, draw_number(engine, number))
        with settings.kernels(), settings.forward(), routing.watched() as seen:
            objective(engine.model, batch.to(engine.device))
        chosen, _, rows = routing.tally(seen, batch.rows)
        share = 1.0 if batch.weight else 0.0
        found = [share * number for number in (rows, *chosen.tolist())]
        own = [a + b for a, b in zip(own, found, strict=True)] if own else found
    rows, *chosen = engine.totals(own)
    return Balance(routing.coefficient, torch.tensor(chosen, device=engine.device), rows)


def draw_number(engine: Engine, number: int) -> int:
    """The number of this rank's micro-batch `number` among those of all ranks. They are dealt in turn, so one has the
    same draws whichever rank it falls to."""
    return number * engine.world + engine.rank


def add_gradient(
    engine: Engine,
    objective: Objective,
    batch: Weighted,
    *,
    weight: int,
    scale: LossScale | None,
    settings: StepSettings,
    watch: Watch = unwatched,
    balance: Balance | None = None,
) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro-batch, whose loss sum is divided by the weight of the whole step; returns its
    sums, loss first, detached. A batch without weight counts nothing.

    balance: of the step, whose load-balancing loss is added to what goes backward, and to no sum but its own."""
    # A blank micro-batch goes forward and backward like any other: its rank must enter every collective of the pass.
    share = 1.0 if batch.weight else 0.0
    routing, extra = settings.routing, {}
    with settings.kernels():
        with watch("forward"), settings.forward(), routing.watched() if routing else nullcontext() as seen:
            out = objective(engine.model, batch.to(engine.device))
        loss = out.loss / weight if share else out.loss * 0.0
        if routing and seen and share:
            routing.count(seen, batch.rows)
            if balance:
                aux = aux_loss(balance, routing.tally(seen, batch.rows)[1])
                loss, extra = loss + balance.coefficient * aux, {AUX_LOSS: aux * weight}  # a mean over the step
        with watch("backward"):
            engine.backward(loss, scale)
    found = {LOSS: out.loss, **out.sums, **extra}
    return {name: value.detach().float() * share for name, value in found.items()}


def _by_group(lr: PerGroup[float], norms: Mapping[str, float]) -> dict[str, float]:
    """Norms and rates of the groups, where there are several."""
    if len(norms) == 1:
        return {}
    rates = {f"lr_{name}": rate for name, rate in lr.items()} if isinstance(lr, Mapping) else {}
    return {**{f"grad_norm_{name}": norm for name, norm in norms.items()}, **rates}


def draw_seed(seed: int, step: int, micro_batch: int) -> int:
    """A well-mixed 63-bit seed; neighbouring steps and micro-batches share nothing."""
    # The last word is always 0. It stays, because without it every seed would be another, and no run would resume.
    words = np.random.SeedSequence((seed, step, micro_batch, 0)).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Set torch's generators on all devices.

    micro_batch: see `draw_number`.
    """
    number = draw_seed(seed, step, micro_batch)
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # it would keep a stack trace for each kind of device that may come yet, which takes longer than all draws
        torch.default_generator.manual_seed(number)
