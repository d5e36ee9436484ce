"""The run as it computes, against the plainest way to compute the same: fp32, padded rows, scores written out.

The same examples go through both, the run's own first micro-batches of the first step or a part of them: which examples
stand side by side hangs on packing and memory, and a twin that made its own batches would compute others. An adapter's
B is 0 before its first step, so that nothing that its scale does would show: what is 0 gets small numbers, the same in
both. Nothing is dropped and no noise is added, because both are drawn for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Weighted
from surefoot.data.comparable import in_padded_rows
from surefoot.doctor.findings import Finding, ok, unknown
from surefoot.doctor.numbers import within_rounding
from surefoot.models.dropout import without_draws
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import readable, usable
from surefoot.planning.packing import PLAIN
from surefoot.planning.plan import RunPlan
from surefoot.stages.fast_paths import Pass, compared_batches, largest_difference, nothing_at_zero, one_pass
from surefoot.stages.planned import make_plan
from surefoot.stages.trial import Ready, ready

_STORING = ("math", "eager")  # attention by one product, a softmax and another product


@dataclass(frozen=True)
class OwnPass:
    """batches: the examples in padded rows, for the twin. seen: what the run computed of them."""

    batches: Sequence[Weighted]
    seen: Pass


def own_pass(one: Ready) -> OwnPass:
    """Loss and gradients of two real micro-batches as the run computes them, packed where it packs."""
    batches = compared_batches(one.run.stage, one.setup.engine, 1)
    padded = [in_padded_rows(batch, one.plan.tokenizer.pad_id) for batch in batches]
    return OwnPass(padded, _pass(one, batches))


def parity_line(config: RunConfig, plan: RunPlan, own: OwnPass, free: int | None) -> Finding:
    """The same examples once more, by `plainest`. plan: as the run carried it out. free: bytes, None where nobody
    knows."""
    if is_plain(plan):
        return ok("FAST-PATH", "does not apply: the run is the plain fp32 path")
    if plan.precision.base.value == "nf4":
        return ok("FAST-PATH", "does not apply: an nf4 base is rounded on purpose")
    twin = plainest(config)
    needed = _needed(twin, own.batches)
    room = usable(plan.memory.available) if free is None else min(free, usable(plan.memory.available))
    if needed > room:
        return unknown("FAST-PATH", f"a second model, in fp32, takes {readable(needed)}, and {readable(room)} are free")
    with ready(twin, 1) as plain:
        error = largest_difference(plain.setup.engine, _pass(plain, own.batches), own.seen)
    fix = "set precision: fp32, data.packing: off, attention: eager, or one of kernels to plain, to see which it is"
    count = sum(len(batch.examples) for batch in own.batches)
    return within_rounding("FAST-PATH", error, plan, fix, seen=f"{count} example{'s' if count > 1 else ''}")


def is_plain(plan: RunPlan) -> bool:
    """Whether a run computes as its twin would."""
    precision = (plan.precision.compute.value, plan.precision.base.value, plan.precision.tf32.value)
    return (
        precision == ("fp32", "fp32", False)
        and all(choice.value == PLAIN for choice in vars(plan.kernels).values())
        and plan.attention.expected.value in _STORING
        and plan.compile.value == "off"
        and not (plan.reward is not None and plan.reward.shared_prompts.value)
    )


def plainest(config: RunConfig) -> RunConfig:
    """The run in fp32, without a kernel of surefoot's and without any of SDPA's. One example at a time and activations
    computed again need the least memory, which scores want a lot of; a pair's common beginning then goes through the
    model twice."""
    kernels = dict.fromkeys(type(config.kernels).model_fields, PLAIN)
    changes = {
        "precision": type(config.precision)(compute="fp32"),
        "attention": type(config.attention)(implementation="eager"),
        "kernels": type(config.kernels).model_validate(kernels),
        "data": config.data.model_copy(update={"packing": "off"}),
        "batch": config.batch.model_copy(update={"micro": 1}),
        "gradient_checkpointing": "on",
        "compile": "off",
    }
    return config.model_copy(update=changes)


def _needed(twin: RunConfig, batches: Sequence[Weighted]) -> int:
    """Bytes of a pass of the twin: no step is taken, so there are no moments."""
    longest = max((max(batch.rows.lengths, default=1) for batch in batches), default=1)
    memory = make_plan(twin, measure=False, lengths=LengthFacts(longest, longest)).memory
    return memory.total - memory.optimizer


def _pass(one: Ready, batches: Sequence[Weighted]) -> Pass:
    engine = one.setup.engine
    with without_draws(engine.model), nothing_at_zero(engine.parameters.values()):
        return one_pass(one.setup, one.run.stage, batches, 1)
