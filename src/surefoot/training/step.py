"""The one optimizer step.

SFT, and every later stage, runs this function. Losses arrive as sums and are divided by the weight of the whole step
(supervised tokens), which is known before the first forward. So the split into micro-batches never changes the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from surefoot.data.batch import Batch
from surefoot.objectives.base import Objective
from surefoot.training.engine import Engine
from surefoot.training.guard import Verdict, judge
from surefoot.training.profile import Stopwatch, Watch, unwatched
from surefoot.training.randomness import seed_micro_batch
from surefoot.training.report import StepReport
from surefoot.training.scaling import LossScale

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepSettings:
    """What stays the same from step to step. forward: autocast as planned. kernels: the attention kernels allowed,
    around forward and backward."""

    seed: int
    max_grad_norm: float | None
    forward: Context
    kernels: Context


def train_step(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Batch],
    *,
    step: int,
    lr: float,
    scale: LossScale | None,
    settings: StepSettings,
    watch: Stopwatch | None = None,
) -> StepReport:
    """Run optimizer step number `step` (from 1) and report it. scale: fp16 loss scale, None otherwise. watch: times
    forward and backward, and changes no number.

    The optimizer moves only when the loss and the gradient norm are finite. One host sync: where the guard looks.
    """
    started = time.perf_counter()
    weight = sum(batch.weight for batch in micro_batches)
    loss_sum = accumulate_gradients(
        engine, objective, micro_batches, step=step, scale=scale, settings=settings, watch=watch or unwatched
    )
    engine.unscale(scale)
    norm = engine.grad_norm()
    loss, grad_norm = torch.stack((loss_sum / weight, norm.float())).tolist()
    verdict = judge(loss, grad_norm, scale_can_fall=scale is not None and scale.can_fall)
    if verdict.decision == "stepped":
        engine.apply(lr, norm, settings.max_grad_norm)
    else:
        engine.discard()
    seconds = time.perf_counter() - started
    report = _report(step, loss, grad_norm, lr, micro_batches, verdict, scale, seconds)
    return report if watch is None else replace(report, profile=watch.profile(report.tokens))


def accumulate_gradients(
    engine: Engine,
    objective: Objective,
    micro_batches: Sequence[Batch],
    *,
    step: int,
    scale: LossScale | None,
    settings: StepSettings,
    watch: Watch = unwatched,
) -> torch.Tensor:
    """Forward and backward of all micro-batches; returns the loss sum, a detached fp32 scalar on the device."""
    weight = sum(batch.weight for batch in micro_batches)
    loss_sum = torch.zeros((), dtype=torch.float32, device=engine.device)
    for number, batch in enumerate(micro_batches):
        seed_micro_batch(settings.seed, step, number)
        loss_sum += add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings, watch=watch)
    return loss_sum


def add_gradient(
    engine: Engine,
    objective: Objective,
    batch: Batch,
    *,
    weight: int,
    scale: LossScale | None,
    settings: StepSettings,
    watch: Watch = unwatched,
) -> torch.Tensor:
    """Forward and backward of one micro-batch, whose loss sum is divided by the weight of the whole step; returns the
    sum, detached."""
    with settings.kernels():
        with watch("forward"), settings.forward():
            loss = objective(engine.model, batch.to(engine.device)).loss
        with watch("backward"):
            engine.backward(loss / weight, scale)
    return loss.detach()


def _report(
    step: int,
    loss: float,
    grad_norm: float,
    lr: float,
    micro_batches: Sequence[Batch],
    verdict: Verdict,
    scale: LossScale | None,
    seconds: float,
) -> StepReport:
    return StepReport(
        step=step,
        loss=None if verdict.non_finite == "loss" else loss,
        grad_norm=None if verdict.non_finite else grad_norm,
        lr=lr,
        weight=sum(batch.weight for batch in micro_batches),
        tokens=sum(batch.tokens for batch in micro_batches),
        examples=tuple(number for batch in micro_batches for number in batch.examples),
        decision=verdict.decision,
        non_finite=verdict.non_finite,
        seconds=seconds,
        scale=None if scale is None else scale.scale,
    )
