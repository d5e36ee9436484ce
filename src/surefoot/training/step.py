"""The optimizer step, used by every training method.

Losses arrive as sums and are divided by the total weight of the step (supervised tokens, pairs, response tokens) over
all micro-batches and ranks, so the split into micro-batches does not change the result.

Random draws are functions of (seed, step, micro-batch, rank). Reseeding before each micro-batch costs microseconds, and
there is no generator state to save, so a resumed run cannot continue with different dropout masks.
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

from surefoot.data.batching.batch import Weighted, numbers_on
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
    """Settings that are the same for every step.

    seed: the run's seed.
    max_grad_norm: clipping norm, one for all parameter groups or one per group; None disables clipping.
    forward: autocast context for forward passes.
    kernels: context that selects the allowed attention kernels, for forward and backward.
    bounds: name of an objective's sum -> largest mean with which a step may still update the weights.
    per_check: tokens between two checks of the moments, see `optimizer_state.moment_check_is_due`.
    passes: context of all passes of a step, by its number.
    after_step: called at the end of every step; must not change the numerics.
    routing: router statistics of a mixture-of-experts model; None otherwise.
    """

    seed: int
    max_grad_norm: PerGroup[float | None]
    forward: Context
    kernels: Context
    bounds: Mapping[str, float] = field(default_factory=dict)
    per_check: float = 0.0
    passes: Callable[[int], AbstractContextManager[object]] = lambda step: nullcontext()
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
    """Run one optimizer step and return its report.

    micro_batches: this rank's micro-batches; every rank has the same number of them.
    step: step number, from 1.
    lr: learning rate, one for all parameter groups or one per group.
    scale: fp16 loss scale, None otherwise.
    ceiling: gradients whose norm over all groups exceeds it are scaled down to it.
    watch: times the parts of the step; does not change the numerics.

    The optimizer steps only if the loss, all gradient norms and (in steps that check them) all moments are finite and
    no bound is exceeded; all ranks decide the same. A step of weight 0 computes nothing. This function synchronizes
    host and device once, for the guard. The passes have syncs of their own: the supervised positions, transformers'
    padding check, and once per step DoRA's factors (`models.fast.adapters`).
    """
    started = time.perf_counter()
    weight, tokens = step_size(engine, micro_batches)
    make_report = partial(
        StepReport,
        step=step,
        lr=next(iter(lr.values())) if isinstance(lr, Mapping) else lr,
        weight=weight,
        tokens=tokens,
        examples=tuple(number for batch in micro_batches for number in batch.examples),
        scale=None if scale is None else scale.scale,
    )
    # A mean over nothing is 0 / 0, and the optimizer would still decay weights and moments with gradients of 0.
    if weight == 0:
        seconds, reason = time.perf_counter() - started, "nothing to learn from"
        return make_report(loss=None, grad_norm=None, decision="held", non_finite=None, seconds=seconds, held=reason)
    with settings.passes(step):
        sums = accumulate_gradients(
            engine, objective, micro_batches, weight=weight, step=step, scale=scale, settings=settings, watch=watch
        )
    with watch("optimizer"):
        # In this order the norms are those of the whole step's gradients, reduced over ranks and unscaled. The guard
        # and clipping use the same norms, so the guard judges the gradients that the optimizer applies.
        engine.reduce()
        engine.unscale(scale)
        norms = engine.grad_norms()
        due = optimizer_state.moment_check_is_due(step, tokens, settings.per_check)
        values = _to_host(engine, sums, norms, weight, engine.moments() if due else {})
        # While the device is at rest; after the update the host would wait for that too.
        load = _expert_loads(engine, settings.routing) if settings.routing else {}
        can_fall = scale is not None and scale.can_fall
        decision, non_finite = judge(values.loss, values.grad_norm, can_fall, bad_moment=bool(values.bad_moment))
        hold_reason = _exceeded_bound(values.metrics, settings.bounds)
        decision = "held" if hold_reason else decision
        spike = ceiling if ceiling is not None and decision == "stepped" and values.grad_norm > ceiling else None
        if decision == "stepped":
            clip_factor = 1.0 if spike is None else spike / values.grad_norm
            engine.apply(lr, norms, _clip_limits(settings.max_grad_norm, values.norms, clip_factor))
        else:
            engine.discard()  # otherwise the next backward pass would accumulate onto non-finite gradients
    settings.after_step()
    report = make_report(
        loss=None if non_finite == "loss" else values.loss,
        grad_norm=values.grad_norm if non_finite in (None, "moment") else None,
        decision=decision,
        non_finite=non_finite,
        seconds=time.perf_counter() - started,
        metrics={**values.metrics, **spread(load), **_group_metrics(lr, values.norms)},
        load=load,
        held=hold_reason,
        spike=spike,
        moment=values.bad_moment,
    )
    if isinstance(watch, Stopwatch):
        return replace(report, profile=watch.profile(tokens))
    return replace(report, traced=True) if watch is named else report


def _expert_loads(engine: Engine, routing: Routing) -> Load:
    """Expert loads summed over all ranks. Collective: every rank must call it."""
    own = routing.take()
    totals = iter(engine.totals([number for counts in own.values() for number in counts]))
    return {name: tuple(int(next(totals)) for _ in counts) for name, counts in own.items()}


@dataclass(frozen=True)
class _StepValues:
    """The values the guard looks at, copied to the host and identical on all ranks.

    loss, metrics: means over the step.
    norms: parameter group -> gradient norm before clipping.
    bad_moment: name of an optimizer moment that is not finite; "" if there is none.
    """

    loss: float
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    bad_moment: str

    @property
    def grad_norm(self) -> float:
        """Norm over all groups."""
        return math.hypot(*self.norms.values())


def _to_host(
    engine: Engine,
    sums: Mapping[str, torch.Tensor],
    norms: Mapping[str, torch.Tensor],
    weight: int,
    moments: Mapping[str, torch.Tensor],
) -> _StepValues:
    """Copy the values that the guard needs to the host, in one synchronization, and reduce them over ranks.

    sums: this rank's sums, loss first.
    norms: parameter group -> gradient norm over all ranks.
    weight: total loss weight of the step (all micro-batches, all ranks).
    moments: optimizer moments to check; empty if the check is not due in this step.
    """
    # This rank's share of each mean; `engine.totals` below adds up the shares of all ranks.
    means = [total / weight for total in sums.values()]
    moment_sum = optimizer_state.moment_norm_sum(moments.values(), engine.device)
    numbers = torch.stack((moment_sum, *means, *(norm.float() for norm in norms.values()))).tolist()
    own, of_groups = numbers[: 1 + len(means)], numbers[1 + len(means) :]
    # NaN and infinity survive the sum, so all ranks judge alike. The norms are those of all ranks already.
    finite, loss, *others = engine.totals(own)
    return _StepValues(
        loss,
        dict(zip(list(sums)[1:], others, strict=True)),
        dict(zip(norms, of_groups, strict=True)),
        "" if math.isfinite(finite) else _bad_moment(engine),
    )


def _bad_moment(engine: Engine) -> str:
    """Name the first non-finite optimizer moment, or "" if only their sum overflowed. Collective."""
    own = optimizer_state.first_bad_moment(engine.moments())
    found = engine.totals([float(bool(own))])[0]
    return own or ("one of another rank" if found else "")


def _clip_limits(limits: PerGroup[float | None], norms: Mapping[str, float], factor: float) -> PerGroup[float | None]:
    """Return each group's clipping norm: its own limit, or `factor` of its norm if that is lower."""
    if factor == 1.0:
        return limits
    found: dict[str, float | None] = {}
    for name, norm in norms.items():
        limit = of_group(limits, name)
        found[name] = factor * norm if limit is None else min(limit, factor * norm)
    return found


def _exceeded_bound(metrics: Mapping[str, float], bounds: Mapping[str, float]) -> str:
    """Describe the first metric above its bound; "" if none is."""
    for name, bound in bounds.items():
        if (value := metrics.get(name, 0.0)) > bound:
            return f"{name.replace('_', ' ')} {value:.4g} is above {bound:g}"
    return ""


def step_size(engine: Engine, micro_batches: Sequence[Weighted]) -> tuple[int, int]:
    """Return (loss weight, input tokens without padding) over all micro-batches and ranks. Collective."""
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
    """Run forward and backward for this rank's micro-batches; return their sums, loss first, as detached fp32 scalars
    on the device.

    weight: total loss weight of the step (all micro-batches, all ranks).
    """
    sums = {LOSS: torch.zeros((), dtype=torch.float32, device=engine.device)}
    balance = None
    if settings.routing:
        settings.routing.take()  # drop loads counted by passes between steps, such as memory trials
    if settings.routing and settings.routing.coefficient:
        with watch("forward"):
            balance = _balance(engine, objective, micro_batches, step=step, settings=settings, routing=settings.routing)
    for number, batch in enumerate(micro_batches):
        # Reseed per micro-batch, not per step: dropout masks must not depend on how many preceded it on this rank.
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
    """Count how the step's tokens are routed, over all micro-batches and ranks. Runs forward passes with the same
    random draws as the step's own passes. Collective."""
    counts: list[torch.Tensor] = []
    tokens = 0.0
    for number, batch in enumerate(micro_batches):
        seed_micro_batch(settings.seed, step, draw_number(engine, number))
        # With gradients, though none are taken: without, `watched` records nothing and objectives count evaluation
        # metrics.
        with settings.kernels(), settings.forward(), routing.watched() as routed:
            objective(engine.model, batch.to(engine.device))
        with torch.no_grad():  # or the probabilities would keep this pass's graph alive during the next pass
            chosen, _, rows = routing.tally(routed, batch.rows)
        if batch.weight:
            tokens += rows
        counts.append(chosen if batch.weight else torch.zeros_like(chosen))
    own = [sum(column) for column in zip(*torch.stack(counts).tolist(), strict=True)]  # one copy to the host in a step
    rows, *total = engine.totals([tokens, *own])
    return Balance(routing.coefficient, numbers_on(engine.device, total), rows)


def draw_number(engine: Engine, number: int) -> int:
    """Return the global index of this rank's micro-batch `number`. Micro-batches are dealt to the ranks in turn, so a
    micro-batch has the same random draws on whichever rank it runs."""
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
    """Run forward and backward for one micro-batch; return its detached sums, loss first (zeros for weight 0).

    weight: total loss weight of the step, by which the loss sum is divided.
    balance: the step's routing statistics; adds the load-balancing loss to the backward pass and reports it separately.
    """
    # A micro-batch of weight 0 still runs forward and backward: its rank must enter every collective of the pass.
    counts = 1.0 if batch.weight else 0.0
    routing, extra = settings.routing, {}
    # The kernels' context covers the backward pass, in which gradient checkpointing runs layers again. Autocast ends
    # before it: checkpointing restores its state, and gradients have the dtypes of the forward pass.
    with settings.kernels():
        with watch("forward"), settings.forward(), routing.watched() if routing else nullcontext() as routed:
            out = objective(engine.model, batch.to(engine.device))
        loss = out.loss / weight if counts else out.loss * 0.0
        if routing and routed:  # of a blank batch too, which counts nothing: all ranks add up the same sums
            routing.count(routed, batch.rows)
            if balance:
                aux = aux_loss(balance, routing.tally(routed, batch.rows)[1])
                loss, extra = loss + balance.coefficient * aux, {AUX_LOSS: aux * weight}  # a mean over the step
        with watch("backward"):
            engine.backward(loss, scale)
    found = {LOSS: out.loss, **out.sums, **extra}
    # Detached, or each sum would keep the graph of its micro-batch alive until the step ends.
    return {name: value.detach().float() * counts for name, value in found.items()}


def _group_metrics(lr: PerGroup[float], norms: Mapping[str, float]) -> dict[str, float]:
    """Return gradient norm and learning rate per parameter group; empty if there is only one group."""
    if len(norms) == 1:
        return {}
    rates = {f"lr_{name}": rate for name, rate in lr.items()} if isinstance(lr, Mapping) else {}
    return {**{f"grad_norm_{name}": norm for name, norm in norms.items()}, **rates}


def draw_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return a well-mixed 63-bit seed; those of neighboring steps and micro-batches are unrelated."""
    # The last word is always 0. Without it all seeds would change, and existing runs could not resume.
    words = np.random.SeedSequence((seed, step, micro_batch, 0)).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch's generators on all devices.

    micro_batch: global index, see `draw_number`.
    """
    number = draw_seed(seed, step, micro_batch)
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # torch.manual_seed records a stack trace per lazily initialized device type, slower than the draws
        torch.default_generator.manual_seed(number)
