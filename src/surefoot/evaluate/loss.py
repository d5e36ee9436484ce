"""Loss, perplexity and token accuracy of a model on tokenised data, weighted by supervised tokens.

What else an objective sums up is divided by the same weight and reported under its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from surefoot.data.batch import Weighted
from surefoot.objectives.base import Objective
from surefoot.training.report import EvalReport
from surefoot.training.step import StepSettings


def evaluate_loss(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Weighted],
    *,
    step: int,
    settings: StepSettings,
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
) -> EvalReport | None:
    """Run `objective` without gradients and with dropout off over all batches; the model's mode is restored.

    give_up: asked before each batch; None is returned once it says so.

    Sums are added in float64, so the result depends on the batch split only through the forward pass itself.
    A non-finite loss is reported as it is.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    loss_sum, weight = 0.0, 0
    sums: dict[str, float] = {}
    tables: dict[str, torch.Tensor] = {}
    try:
        with torch.no_grad():
            for batch in batches:
                if give_up():
                    return None
                with settings.kernels(), settings.forward():
                    out = objective(model, batch.to(device))
                loss_sum += float(out.loss)
                for name, value in out.sums.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, table in out.tables.items():
                    tables[name] = tables.get(name, 0.0) + table.double().cpu()
                weight += batch.weight
    finally:
        model.train(was_training)
    loss = loss_sum / weight
    means = {name: value / weight for name, value in sums.items()}
    accuracy = means.pop("correct", None)
    seconds = time.perf_counter() - started
    kept = {name: table.tolist() for name, table in tables.items()}
    return EvalReport(step, loss, perplexity(loss), accuracy, weight, seconds, means, kept)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
