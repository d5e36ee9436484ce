"""Compare the run's computation with the plainest equivalent: fp32, padded rows, eager attention.

Both use the same examples, the run's own first micro-batches of the first step or a part of them, because the grouping
of examples depends on packing and memory. An adapter's B is 0 before the first step and would hide errors of its scale,
so zero weights get the same small values in both. Dropout and noise are off, because both are drawn per micro-batch; so
is the rounding of `precision.qat`, which a last bit before it can change by half a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from surefoot.commands.doctor.findings import Finding, fault, ok, unknown
from surefoot.commands.doctor.numbers import within_rounding
from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.subsets import in_padded_rows
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import causal_model
from surefoot.models.modes import without_randomness
from surefoot.planning.fast_paths import plainly
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import usable
from surefoot.planning.plan import PLAIN, RunPlan
from surefoot.runs.make_plan import make_plan
from surefoot.runs.parity.differences import Pass, largest_difference
from surefoot.runs.parity.fast_paths import planned_paths
from surefoot.runs.parity.in_fp32 import ATTENTION, LIMIT, Formulas, compare_formulas
from surefoot.runs.parity.passes import compared_batches, nonzero_matrices, one_pass
from surefoot.runs.trial import Ready, ready
from surefoot.system.messages import size_text

_CODE = "FAST-PATH"
_STORING = ("math", "eager")  # attention that stores all scores
_ALLOWED = f"rounding allows {LIMIT:g}"
_OTHERWISE = {"data.packing": "off", "attention": "eager"}


@dataclass(frozen=True)
class OwnPass:
    """The run's own pass. rows: micro-batches as in the run. padded: the examples in padded rows, for the plain model.
    seen: what the run computed."""

    rows: Sequence[Weighted]
    padded: Sequence[Weighted]
    seen: Pass


def own_pass(one: Ready) -> OwnPass:
    """Loss and gradients of two real micro-batches as the run computes them, packed if it packs."""
    rows = compared_batches(one.run.task, one.loaded.engine, 1, whole=one.run.config.method.teacher)
    padded = [in_padded_rows(batch, one.plan.tokenizer.pad_id) for batch in rows]
    return OwnPass(rows, padded, _pass(one, rows))


def parity_lines(config: RunConfig, plan: RunPlan, own: OwnPass, free: int | None) -> Iterator[Finding]:
    """Compare with `plainest`, and with the run's fast paths in fp32, on the same examples. plan: as carried out by the
    run.
    free: bytes, None if unknown."""
    if is_plain(plan):
        yield ok(_CODE, "does not apply: the run is the plain fp32 path")
        return
    twin = plainest(config)
    needed = _needed(twin, own.padded)
    room = usable(plan.memory.available) if free is None else min(free, usable(plan.memory.available))
    if needed > room:
        yield unknown(_CODE, f"a second model in fp32 needs {size_text(needed)}, but only {size_text(room)} are free")
        return
    with ready(twin, 1) as plain:
        whole = _whole_line(plain, plan, own)
        yield whole
        if plan.precision.compute.value != "fp32" or whole.verdict == "fault":
            task = plain.run.task
            paths = paths_of(plan)
            found = compare_formulas(plain.loaded, task, paths, own.rows, own.padded, 1) if paths else None
            yield from _formula_lines(found) if found else ()


def _whole_line(plain: Ready, plan: RunPlan, own: OwnPass) -> Finding:
    """Compare the run's own computation with the plain model."""
    # A quantized base differs from fp32 by its rounding, far more than by the errors searched for here.
    if packed := plan.precision.packed:
        return ok(_CODE, f"does not apply to the whole run: a base in {packed} is rounded on purpose")
    error = largest_difference(plain.loaded.engine, _pass(plain, own.padded), own.seen)
    fix = "set precision: fp32, data.packing: off, attention: eager, or single kernels to plain, to find the cause"
    count = sum(len(batch.examples) for batch in own.padded)
    return within_rounding(_CODE, error, plan, fix, seen=f"{count} example{'s' if count > 1 else ''}")


def _formula_lines(found: Formulas) -> Iterator[Finding]:
    if found.compared and not found.wrong:
        names = ", ".join(found.compared)
        yield ok(_CODE, f"{names}, in fp32: they differ by {found.error:.2g}; {_ALLOWED}", where="fp32")
    for key, error in found.wrong.items():
        fix = f"set {key} to {_OTHERWISE.get(key, 'plain')}, and please report it"
        yield fault(_CODE, f"computes wrong values: in fp32 it differs by {error:.2g}; {_ALLOWED}", fix, where=key)
    for key, why in found.unseen.items():
        yield replace(unknown(_CODE, f"cannot run in fp32 ({why})"), where=key)


def paths_of(plan: RunPlan) -> list[FastPath]:
    """The run's differences from a model in fp32 with eager attention and padded rows, in the order of installation."""
    form, implementation = plan.kernels.documents.value, plan.attention.implementation.value
    attention = [_attention(implementation)] if form == PLAIN and implementation == "sdpa" else []
    return [*attention, *planned_paths(plan)]


def is_plain(plan: RunPlan) -> bool:
    """Whether a run computes exactly like the plain model."""
    precision = (plan.precision.compute.value, plan.precision.base.value, plan.precision.tf32.value)
    return (
        precision == ("fp32", "fp32", False)
        and all(choice.value == PLAIN for choice in vars(plan.kernels).values())
        and plan.attention.expected.value in _STORING
        and plan.compile.value == "off"
        and not (plan.reward is not None and plan.reward.shared_prompts.value)
    )


def plainest(config: RunConfig) -> RunConfig:
    """The run's config in plain fp32. One example per micro-batch and gradient checkpointing save memory for the
    scores; a pair's shared prompt is computed twice."""
    changes = {
        "precision": type(config.precision)(compute="fp32"),
        "batch": config.batch.model_copy(update={"micro": 1}),
        "gradient_checkpointing": "on",
    }
    return plainly(config).model_copy(update=changes)


def _needed(twin: RunConfig, batches: Sequence[Weighted]) -> int:
    """Bytes for a pass of the plain model, without optimizer moments."""
    longest = max((max(batch.rows.lengths, default=1) for batch in batches), default=1)
    memory = make_plan(twin, measure=False, lengths=LengthFacts(longest, longest)).memory
    return memory.total - memory.optimizer


def _pass(one: Ready, batches: Sequence[Weighted]) -> Pass:
    engine = one.loaded.engine
    with without_randomness(engine.model), nonzero_matrices(engine):
        return one_pass(one.loaded, one.run.task, batches, 1)


def _attention(implementation: str) -> FastPath:
    def install(model: nn.Module) -> Undo:
        inner = causal_model(model)
        before = inner.config._attn_implementation or "sdpa"
        inner.set_attn_implementation(implementation)
        return lambda: inner.set_attn_implementation(before)

    return FastPath(ATTENTION, install)
