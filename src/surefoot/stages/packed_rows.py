"""Packed rows before step 1: the attention that keeps documents apart is put in, if it does.

Some examples of the step that comes next go through the model twice, in padded rows and as a packed row, with loss and
gradients; nothing is dropped and no noise is added, as that would be drawn otherwise. Then one document is changed, and
the others must not move. Whatever else a model does along its rows (a convolution, a state that is carried on) shows
here. Where the two differ by more than rounding, or a document is heard by another, rows are padded, and the plan says
so.

This comes before the other fast paths: from here on the batches of the run are what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from surefoot.data.batch import Batch
from surefoot.data.loader import dealt
from surefoot.data.pack import even_part, unpacked
from surefoot.errors import EnvironmentFault, Fault
from surefoot.models.dropout import no_dropout
from surefoot.models.forward import hidden_states
from surefoot.models.packing import NAME, packed_attention
from surefoot.planning.packing import PLAIN, STAGES, without_packing
from surefoot.planning.plan import RunPlan
from surefoot.stages.fast_paths import LIMITS, Settled, largest_difference, one_pass
from surefoot.stages.prepare import Prepared
from surefoot.stages.setup import Setup
from surefoot.stages.sft import step_layout
from surefoot.stages.stage import Stage

_BATCHES = 2
# The other documents' rows go through the same products at the same places, so that they do not move at all; a kernel
# that adds in no fixed order moves them by a last place.
_NO_LEAK = 1e-2


def settle_packing(run: Prepared, setup: Setup, say: Callable[[str], None]) -> Settled:
    """Put the attention in and leave it in. say: is told where it was taken out. Every rank must ask.

    Raises EnvironmentFault where packing was asked for and differs.
    """
    plan = setup.plan
    form = plan.kernels.documents.value
    if form == PLAIN:
        return Settled(plan, {})
    path = packed_attention(form)
    if why := path.obstacle(setup.engine.model):
        return Settled(_without(plan, f"cannot be used: {why}", say), {NAME: {"used": False, "obstacle": why}})
    batches, step = _examples(run, setup), _step(run, setup)
    padded = [unpacked(batch, plan.tokenizer.pad_id) for batch in batches]
    limit = LIMITS[plan.precision.compute.value]
    with _without_draws(setup.engine.model):
        plain = one_pass(setup, run.stage, padded, step)
        undo = path.install(setup.engine.model)
        error = largest_difference(setup.engine, plain, one_pass(setup, run.stage, batches, step))
        leak = _leak(setup, batches[0])
    used = error <= limit and leak <= _NO_LEAK
    found: dict[str, Any] = {"form": form, "error": error, "limit": limit, "leak": leak, "used": used}
    if not used:
        undo()
        what = f"differs from padded rows by {error:.2g} of loss or gradient on this model; allowed is {limit:g}"
        if leak > _NO_LEAK:
            what = f"lets one document move another by {leak:.2g} of what it moves itself, on this model"
        plan = _without(plan, what, say)
    return Settled(plan, {NAME: found})


def as_planned(run: Prepared, plan: RunPlan) -> Stage:
    """The stage with its batches as the plan lays them out."""
    if run.config.stage not in STAGES or plan.kernels.documents.value == run.plan.kernels.documents.value:
        return run.stage
    return replace(run.stage, step_batches=step_layout(run.config, plan, run.stage.data))


@torch.no_grad()
def _leak(setup: Setup, batch: Batch) -> float:
    """How far all other documents' hidden states move when the first one says something else, as a share of how far
    its own do; added up over the ranks."""
    batch = batch.to(setup.engine.device)
    first = batch.documents[0]
    ids = batch.input_ids.clone()
    ids[0, :first] = batch.input_ids[0].flip(0)[:first]
    with setup.settings.kernels(), setup.settings.forward():
        one, two = (hidden_states(setup.engine.model, rows) for rows in (batch, replace(batch, input_ids=ids)))
    change = (one[0] - two[0]).float()
    own, others = float(change[:first].norm()), float(change[first:].norm())
    return setup.engine.totals([others / own if own else others])[0]


def _examples(run: Prepared, setup: Setup) -> list[Batch]:
    """Of the next step: a part of each of this rank's first rows that is no larger in padded rows."""
    engine = setup.engine
    rows = list(dealt(run.stage.step_batches(_step(run, setup)), engine.rank, engine.world))[:_BATCHES]
    return [even_part(row.rows, row.rows.input_ids.numel()) for row in rows]


def _step(run: Prepared, setup: Setup) -> int:
    return min(setup.state.step + 1, run.timetable.total_steps)


@contextmanager
def _without_draws(model: nn.Module) -> Iterator[None]:
    """No dropout; and the model as a whole says that it does not train, which ends NEFTune's noise, while its layers go
    on to: whether they recompute activations hangs on it."""
    training, model.training = model.training, False
    try:
        with no_dropout(model):
            yield
    finally:
        model.training = training


def _without(plan: RunPlan, what: str, say: Callable[[str], None]) -> RunPlan:
    choice = plan.kernels.documents
    if choice.source == "user":
        raise EnvironmentFault(Fault("data.packing", f"{choice.value} {what}", "set data.packing: auto or off"))
    say(f"data.packing: {choice.value} {what}; rows are padded")
    return without_packing(plan, f"{choice.value} {what}", "measured")
