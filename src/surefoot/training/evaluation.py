"""Loss, perplexity and token accuracy of a model on tokenised data, weighted by supervised tokens; of a stage that
learns from pairs or judged answers its loss, weighted by these.

What else an objective sums up is divided by the same weight and reported under its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from surefoot.data.batch import Weighted
from surefoot.models.modes import eval_mode
from surefoot.training.objective import LossSum, Objective
from surefoot.training.report import EvalReport, Unit
from surefoot.training.step import StepSettings


def evaluate_loss(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Weighted],
    *,
    step: int,
    settings: StepSettings,
    device: torch.device,
    unit: Unit = "tokens",
    give_up: Callable[[], bool] = lambda: False,
    totals: Callable[[Sequence[float]], list[float]] = list,
) -> EvalReport | None:
    """Run `objective` without gradients and with dropout off over all batches; the model's mode is restored.

    unit: what the batches weigh; of tokens the loss is a cross entropy, and has a perplexity.
    give_up: asked before each batch; None is returned once it says so. totals: adds numbers up over the ranks, of which
    each has its own batches, and as many.

    Sums are added in float64, so the result depends on the batch split only through the forward pass itself.
    A non-finite loss is reported as it is.
    """
    started = time.perf_counter()
    loss_sum, weight = 0.0, 0
    sums: dict[str, float] = {}
    tables: dict[str, torch.Tensor] = {}
    with without_learning(model):
        for batch in batches:
            if give_up():
                return None
            out = one_pass(model, objective, batch, settings=settings, device=device)
            counts = batch.weight > 0  # a blank one is there so that ranks keep step
            loss_sum += float(out.loss) if counts else 0.0
            for name, value in out.sums.items():
                sums[name] = sums.get(name, 0.0) + (float(value) if counts else 0.0)
            for name, table in out.tables.items():
                found = table.double().cpu()
                tables[name] = tables.get(name, 0.0) + (found if counts else torch.zeros_like(found))
            weight += batch.weight
    loss_sum, total, *added = totals([loss_sum, weight, *sums.values()])
    sums = dict(zip(sums, added, strict=True))
    tables = {name: torch.tensor(totals(one.flatten().tolist())).view_as(one) for name, one in tables.items()}
    weight, loss = int(total), loss_sum / total
    means = {name: value / weight for name, value in sums.items()}
    accuracy = means.pop("correct", None)
    seconds = time.perf_counter() - started
    kept = {name: table.tolist() for name, table in tables.items()}
    found = perplexity(loss) if unit == "tokens" else None
    return EvalReport(step, loss, found, accuracy, weight, seconds, means, kept, unit)


@contextmanager
def without_learning(model: nn.Module) -> Iterator[None]:
    """Inside, the model is evaluated: without gradients, and with dropout off."""
    with eval_mode(model), torch.no_grad():
        yield


def one_pass(
    model: nn.Module, objective: Objective, batch: Weighted, *, settings: StepSettings, device: torch.device
) -> LossSum:
    """Of one batch, to be taken `without_learning`."""
    with settings.kernels(), settings.forward():
        return objective(model, batch.to(device))


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
