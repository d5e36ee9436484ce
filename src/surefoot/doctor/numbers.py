"""Whether the run computes what it is meant to, on the user's own weights and examples; nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.doctor.findings import Finding, fault, ok
from surefoot.doctor.passes import in_micro_batches
from surefoot.models.forward import logits_at
from surefoot.models.modes import evaluating
from surefoot.planning.memory import usable
from surefoot.planning.plan import DType, RunPlan
from surefoot.stages.fast_paths import LIMITS, Pass, largest_difference, one_pass
from surefoot.stages.trial import Ready, ready

_EXAMPLES = 4  # that are taken together and one by one
# Shapes are the same, so kernels and their order of sums are: what is left is for kernels that add up as they come.
_LEAK: Mapping[DType, float] = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}


def split_line(one: Ready) -> Finding:
    """A micro-batch of k examples against k micro-batches of one: loss sums and gradients add up, so only rounding may
    differ. Dropout is off, because every micro-batch draws its own."""
    run, setup = one.run, one.setup
    size = min(_EXAMPLES, run.plan.batch.size.value)
    if size < 2:
        return ok("MICRO-BATCH-SUM", "a step has one example")
    together, apart = (in_micro_batches(one, micro) for micro in (size, 1))
    with evaluating(setup.engine.model):
        whole = one_pass(setup, run.stage, together[:1], 1)
        same = [batch for batch in apart if batch.examples[0] in together[0].examples]
        parts = one_pass(setup, run.stage, same, 1)
    error = largest_difference(setup.engine, parts, whole)
    return _compared("MICRO-BATCH-SUM", error, run.plan, "a loss of your own must be a sum over its batch.weight")


def leak_line(one: Ready) -> Finding:
    """The second document's logits before and after the first one's tokens change; it may be a row of its own, or
    stand behind the first in one row."""
    setup = one.setup
    rows = in_micro_batches(one, 2)[0].rows.to(setup.engine.device)
    if len(rows.lengths) < 2:
        return ok("PACK-LEAK", "a micro-batch has one document")
    start = rows.lengths[0] if rows.documents else rows.input_ids.shape[1]
    places = torch.arange(rows.lengths[1], device=rows.input_ids.device) + start
    with torch.no_grad(), evaluating(setup.engine.model), setup.settings.kernels(), setup.settings.forward():
        before, after = (logits_at(setup.policy, one_of, places).float() for one_of in (rows, _changed(rows)))
    error = float((after - before).norm() / before.norm())
    fix = "set data.packing: off and attention: auto; what still moves comes from the model itself"
    return _compared("PACK-LEAK", error, one.run.plan, fix, _LEAK)


def _changed(rows: Batch) -> Batch:
    """Every token of the first document is its last one."""
    ids = rows.input_ids.clone()
    ids[0, : rows.lengths[0]] = ids[0, rows.lengths[0] - 1]
    return replace(rows, input_ids=ids)


def parity_pass(one: Ready) -> Pass:
    """Loss and gradients of two real micro-batches as the run computes them, for `parity_line`."""
    return one_pass(one.setup, one.run.stage, one.run.stage.step_batches(1)[:2], 1)


def parity_line(config: RunConfig, plan: RunPlan, seen: Pass, free: int | None) -> Finding | None:
    """The same pass once more by the plainest way there is: fp32 weights and products, the math kernel, none of
    surefoot's own kernels. seen: what the run computed. free: bytes, None where nobody knows. None where the run is
    that way itself, or where a second model in fp32 may not fit."""
    room = 8 * plan.parameters < usable(plan.memory.available) and (free is None or 8 * plan.parameters < free)
    if plan.precision.base.value == "nf4" or not room:
        return None
    with ready(plainest(config, plan), 1) as plain:
        if plain.plan.precision == plan.precision and plain.setup.plan.kernels == plan.kernels:
            return None
        error = largest_difference(plain.setup.engine, parity_pass(plain), seen)
    fix = "set precision: fp32, or kernels.adapter, loss and pointwise to plain, to see which of them it is"
    return _compared("FAST-PATH", error, plan, fix)


def plainest(config: RunConfig, plan: RunPlan) -> RunConfig:
    """The run in fp32 with plain kernels, and with micro-batches as they are."""
    plain = dict.fromkeys(type(config.kernels).model_fields, "plain")
    changes = {
        "precision": type(config.precision)(compute="fp32"),
        "kernels": type(config.kernels).model_validate(plain),
        "batch": config.batch.model_copy(update={"micro": plan.batch.micro.value}),
        "compile": "off",
    }
    return config.model_copy(update=changes)


def _compared(code: str, error: float, plan: RunPlan, fix: str, limits: Mapping[DType, float] = LIMITS) -> Finding:
    limit = limits[plan.precision.compute.value]
    said = f"they differ by {error:.2g}; rounding allows {limit:g} in {plan.precision.compute.value}"
    return ok(code, said) if error <= limit else fault(code, said, fix)
