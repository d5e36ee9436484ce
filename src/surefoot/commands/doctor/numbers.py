"""Whether examples that go through the model together are computed as if each went alone; nothing is timed.

On the user's own weights and examples. `surefoot.commands.doctor.parity` holds the arithmetic itself against a plain
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
from surefoot.planning.plan import PLAIN, DType, RunPlan
from surefoot.runs.parity.differences import LIMITS, largest_difference
from surefoot.runs.parity.passes import nonzero_matrices, one_pass
from surefoot.runs.trial import Ready
from surefoot.system.messages import first_few

_LOOKED_FOR = 3  # steps, before a tensor counts as one without a gradient: an expert may have no token in one
_SHOWN = 2  # modules
_EXAMPLES = 4  # that are taken together and one by one
# Shapes are the same, so kernels and their order of sums are: what is left is for kernels that add up as they come.
_LEAK: Mapping[DType, float] = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}


def split_line(one: Ready) -> Finding:
    """A micro-batch of k examples against k micro-batches of one: loss sums and gradients add up, so only rounding may
    differ. Dropout is off, because every micro-batch draws its own, and nothing is 0, as a reward model's head is at
    first."""
    run, loaded = one.run, one.loaded
    size = min(_EXAMPLES, run.plan.batch.size.value)
    if size < 2:
        return ok("MICRO-BATCH-SUM", "does not apply: a step has one example")
    together, apart = (in_micro_batches(one, micro) for micro in (size, 1))
    fullest = max(together, key=lambda batch: len(batch.examples))  # packed rows are of like length, not of like number
    same = _of_the_same(fullest.examples, apart)
    with eval_mode(loaded.engine.model), nonzero_matrices(loaded.engine.parameters.values()):
        whole = one_pass(loaded, run.task, [fullest], 1)
        parts = one_pass(loaded, run.task, same, 1)
    error = largest_difference(loaded.engine, parts, whole)
    fix = "a loss of your own must be a sum over its batch.weight"
    return within_rounding("MICRO-BATCH-SUM", error, run.plan, fix, seen=f"{len(same)} examples")


def _of_the_same(examples: Sequence[RecordName], apart: Sequence[Weighted]) -> list[Weighted]:
    """One of `apart`, which have one example each, for every one of `examples`; a step may hold an example twice."""
    left, found = list(examples), []
    for batch in apart:
        if batch.examples[0] in left:
            left.remove(batch.examples[0])
            found.append(batch)
    return found


def leak_line(one: Ready) -> Finding:
    """A micro-batch of the run as it is, with what other documents' hidden states do when every second one says
    something else: first the first, the third and so on, then the others. Documents are the examples of a packed row,
    or rows of their own."""
    loaded = one.loaded
    rows = _with_several(one)
    if rows is None and one.plan.batch.micro.value == 1 and one.plan.kernels.documents.value == PLAIN:
        return ok("PACK-LEAK", "does not apply: every micro-batch has one document")
    if rows is None:
        return unknown("PACK-LEAK", f"in the first {STEPS} steps every micro-batch has one document")
    rows = replace(rows, pixels=(), seen=None).to(loaded.engine.device)  # other tokens would need other pictures
    vocabulary = causal_model(loaded.policy).get_input_embeddings().get_parameter("weight").shape[0]
    with torch.no_grad(), eval_mode(loaded.engine.model), loaded.settings.kernels(), loaded.settings.forward():
        before = _documents(rows, hidden_states(loaded.policy, rows))
        error = 0.0
        for first in (0, 1):
            other = _changed(rows, first, vocabulary)
            after = _documents(rows, hidden_states(loaded.policy, other))
            stayed = range(1 - first, len(before), 2)
            error = max([error, *(_move(before[place], after[place]) for place in stayed)])
    fix = "set data.packing: off and attention: auto; what still moves comes from the model itself"
    where = "one packed row" if rows.documents else "padded rows"
    return within_rounding("PACK-LEAK", error, one.plan, fix, _LEAK, seen=f"{len(before)} documents in {where}")


def gradient_line(one: Ready) -> Finding:
    """Whether all that trains gets a gradient. A module whose own forward multiplies by the frozen weight alone goes
    round its adapter, and nothing else shows it: the loss falls by what the other modules learn."""
    loaded, task = one.loaded, one.run.task
    without = list(loaded.engine.parameters)
    with nonzero_matrices(loaded.engine.parameters.values()):
        for step in range(1, _LOOKED_FOR + 1):
            found = one_pass(loaded, task, few(task.step_batches(step)), step).gradients
            without = [name for name in without if name not in found or not found[name].any()]
            if not without:
                return ok("GRAD-NONE", f"0 of {len(loaded.engine.parameters)} tensors")
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in without))
    said = f"{len(without)} of {len(loaded.engine.parameters)} tensors, in {first_few(modules, _SHOWN)}"
    fix = "their modules' forward goes round what trains: leave them out of adapter.targets, or take the library's own"
    return caution("GRAD-NONE", said, fix)


def _with_several(one: Ready) -> Batch | None:
    """The first micro-batch of the run that has two documents or more."""
    for step in range(1, STEPS + 1):
        for batch in one.run.task.step_batches(step):
            if len(batch.rows.lengths) > 1:
                return batch.rows
    return None


def _move(before: torch.Tensor, after: torch.Tensor) -> float:
    """As a share; infinite where something is not a number."""
    share = float((after - before).norm() / before.norm())
    return share if math.isfinite(share) else math.inf


def _documents(rows: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """values: [B, T, H] of the rows' tokens. Of each document its own, [its tokens, H] in fp32."""
    if rows.documents:
        return list(values[0].float().split(rows.documents))
    return [row[:length].float() for row, length in zip(values, rows.lengths, strict=True)]


def _changed(rows: Batch, first: int, vocabulary: int) -> Batch:
    """Every token of every second document, from `first` on, is the next one of the vocabulary."""
    ids = rows.input_ids.clone()
    documents = ids[0].split(rows.documents) if rows.documents else list(ids)
    for document in documents[first::2]:
        document.add_(1).remainder_(vocabulary)
    return replace(rows, input_ids=ids)


def within_rounding(
    code: str, error: float, plan: RunPlan, fix: str, limits: Mapping[DType, float] = LIMITS, *, seen: str = ""
) -> Finding:
    """error: a share. limits: what rounding allows of it, by the run's type. seen: what was compared."""
    limit = limits[plan.precision.compute.value]
    said = f"they differ by {error:.2g}; rounding allows {limit:g} in {plan.precision.compute.value}"
    said = f"{seen}: {said}" if seen else said
    return ok(code, said) if error <= limit else fault(code, said, fix)
