"""Check that examples processed together are computed as if each were alone; nothing is timed.

Uses the run's own weights and examples. `surefoot.commands.doctor.parity` compares the arithmetic itself with a plain
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from surefoot.commands.doctor.findings import Finding, caution, fault, ok, unknown
from surefoot.commands.doctor.passes import in_micro_batches
from surefoot.commands.doctor.steps import STEPS, few
from surefoot.data.batching.batch import Batch, RecordName, Weighted
from surefoot.models.forward import causal_model, hidden_states
from surefoot.models.modes import eval_mode
from surefoot.models.qat import unrounded
from surefoot.planning.plan import PLAIN, DType, RunPlan
from surefoot.runs.parity.differences import LIMITS, largest_difference
from surefoot.runs.parity.passes import nonzero_matrices, one_pass
from surefoot.runs.trial import Ready
from surefoot.system.messages import first_few

_LOOKED_FOR = 3  # steps before a tensor counts as one without a gradient: an expert may get no token in one step
_SHOWN = 2  # modules named
_EXAMPLES = 4  # number processed together and one at a time
# Equal shapes use the same kernels and order of sums; the tolerance is for kernels that sum in any order.
_LEAK: Mapping[DType, float] = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}


def split_line(one: Ready) -> Finding:
    """Compare a micro-batch of k examples with k micro-batches of one: loss sums and gradients add up, so only rounding
    may differ. Dropout is off, because each micro-batch draws its own. Zero weights, such as a new reward head's, get
    values."""
    run, loaded = one.run, one.loaded
    size = min(_EXAMPLES, run.plan.batch.size.value)
    if size < 2:
        return ok("MICRO-BATCH-SUM", "does not apply: a step has one example")
    together, apart = (in_micro_batches(one, micro) for micro in (size, 1))
    fullest = max(
        together, key=lambda batch: len(batch.examples)
    )  # packed rows have similar lengths but different numbers of documents
    same = _of_the_same(fullest.examples, apart)
    with eval_mode(loaded.engine.model), nonzero_matrices(loaded.engine):
        whole = one_pass(loaded, run.task, [fullest], 1)
        parts = one_pass(loaded, run.task, same, 1)
    error = largest_difference(loaded.engine, parts, whole)
    fix = "a custom loss must be a sum, with batch.weight as its weight"
    return within_rounding("MICRO-BATCH-SUM", error, run.plan, fix, seen=f"{len(same)} examples")


def _of_the_same(examples: Sequence[RecordName], apart: Sequence[Weighted]) -> list[Weighted]:
    """Select from `apart` (one example each) those of `examples`; a step may contain an example twice."""
    left, found = list(examples), []
    for batch in apart:
        if batch.examples[0] in left:
            left.remove(batch.examples[0])
            found.append(batch)
    return found


def leak_line(one: Ready) -> Finding:
    """Compare the hidden states of one micro-batch's documents before and after every second other document is changed:
    first the odd documents are kept, then the even ones. Documents are examples of a packed row, or rows of their
    own."""
    loaded = one.loaded
    rows = _with_several(one)
    if rows is None and one.plan.batch.micro.value == 1 and one.plan.kernels.documents.value == PLAIN:
        return ok("PACK-LEAK", "does not apply: every micro-batch has one document")
    if rows is None:
        return unknown("PACK-LEAK", f"in the first {STEPS} steps every micro-batch has one document")
    # Without pictures, which changed tokens would not match.
    rows = replace(rows, pictures=None, seen=None).to(loaded.engine.device)
    vocabulary = causal_model(loaded.policy).get_input_embeddings().get_parameter("weight").shape[0]
    model = loaded.engine.model
    with torch.no_grad(), eval_mode(model), unrounded(model), loaded.settings.kernels(), loaded.settings.forward():
        before = _documents(rows, hidden_states(loaded.policy, rows))
        error = 0.0
        for first in (0, 1):
            other = _changed(rows, first, vocabulary)
            after = _documents(rows, hidden_states(loaded.policy, other))
            stayed = range(1 - first, len(before), 2)
            error = max([error, *(_move(before[place], after[place]) for place in stayed)])
    fix = "set data.packing: off and attention: auto; a remaining difference comes from the model itself"
    where = "one packed row" if rows.documents else "padded rows"
    return within_rounding("PACK-LEAK", error, one.plan, fix, _LEAK, seen=f"{len(before)} documents in {where}")


def gradient_line(one: Ready) -> Finding:
    """Check that every trained tensor gets a gradient. A module whose forward multiplies by the frozen weight directly
    bypasses its adapter, and nothing else reveals it: the loss still falls by what the other modules learn."""
    loaded, task = one.loaded, one.run.task
    without = list(loaded.engine.parameters)
    with nonzero_matrices(loaded.engine):
        for step in range(1, _LOOKED_FOR + 1):
            found = one_pass(loaded, task, few(task.step_batches(step)), step).gradients
            without = [name for name in without if name not in found or not found[name].any()]
            if not without:
                return ok("GRAD-NONE", f"0 of {len(loaded.engine.parameters)} tensors")
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in without))
    said = f"{len(without)} of {len(loaded.engine.parameters)} tensors, in {first_few(modules, _SHOWN)}"
    fix = "the modules' forward bypasses them: remove them from adapter.targets, or use the library's own modules"
    return caution("GRAD-NONE", said, fix)


def _with_several(one: Ready) -> Batch | None:
    """The run's first micro-batch with two or more documents."""
    for step in range(1, STEPS + 1):
        for batch in one.run.task.step_batches(step):
            if len(batch.rows.lengths) > 1:
                return batch.rows
    return None


def _move(before: torch.Tensor, after: torch.Tensor) -> float:
    """Relative difference; infinite if a value is NaN."""
    share = float((after - before).norm() / before.norm())
    return share if math.isfinite(share) else math.inf


def _documents(rows: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """Split values [B, T, H] by document: [its tokens, H] each, in fp32."""
    if rows.documents:
        return list(values[0].float().split(rows.documents))
    return [row[:length].float() for row, length in zip(values, rows.lengths, strict=True)]


def _changed(rows: Batch, first: int, vocabulary: int) -> Batch:
    """Replace every token of every second document, starting with `first`, by the next one of the vocabulary."""
    ids = rows.input_ids.clone()
    documents = ids[0].split(rows.documents) if rows.documents else list(ids)
    for document in documents[first::2]:
        document.add_(1).remainder_(vocabulary)
    return replace(rows, input_ids=ids)


def within_rounding(
    code: str, error: float, plan: RunPlan, fix: str, limits: Mapping[DType, float] = LIMITS, *, seen: str = ""
) -> Finding:
    """error: relative difference. limits: what rounding allows, by the run's type. seen: what was compared."""
    limit = limits[plan.precision.compute.value]
    said = f"they differ by {error:.2g}; rounding allows {limit:g} in {plan.precision.compute.value}"
    said = f"{seen}: {said}" if seen else said
    return ok(code, said) if error <= limit else fault(code, said, fix)
