"""How the micro-batches of a run are laid out, as its plan has it: those of a step, and those of an evaluation."""

from __future__ import annotations

from dataclasses import replace

from surefoot.data.layout import Layout
from surefoot.data.prepare import PreparedData
from surefoot.planning.plan import PLAIN, RunPlan


def step_layout(plan: RunPlan, data: PreparedData) -> Layout:
    """Of the examples, pairs or judged answers of one step: packed, or padded and counted in tokens or in items."""
    micro, tokens, pad = plan.batch.micro.value, plan.batch.tokens, plan.tokenizer.pad_id
    most = micro if tokens is None else None
    if plan.kernels.documents.value == PLAIN:
        return Layout(pad, most, tokens)
    longest = int(data.train.lengths.reshape(-1, data.rows_per_item).sum(axis=1).max())
    return Layout(pad, most, tokens or micro * longest, packed=True, ranks=plan.parallel.ranks.value)


def whole_layout(plan: RunPlan, data: PreparedData) -> Layout:
    """Of a whole data set that is evaluated: packed like the steps; padded rows, of which all are of like length here,
    by their number."""
    layout = step_layout(plan, data)
    return layout if layout.packed else replace(layout, most=plan.batch.micro.value, tokens=None)
