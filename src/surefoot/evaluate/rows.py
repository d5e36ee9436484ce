"""How `surefoot evaluate` sends data through a run's model: with the fast paths that the run evaluated with.

Packed rows where the run's plan packs, and the chunked output head where its plan has it; both come out again. Where
another device is at hand, a family's window is shorter than the data, or the path does not fit the model as it was
opened, rows are padded and the head is the model's own: the numbers are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn

from surefoot.data.batching.packing import Layout
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import whole_layout
from surefoot.methods.open_model import OpenModel
from surefoot.models.facts import facts_of
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.fast.path import FastPath
from surefoot.planning.attention import mask_reason
from surefoot.planning.fast_paths import head_rows
from surefoot.planning.packing import without_packing
from surefoot.planning.plan import PLAIN

ROWS = 8  # examples or pairs of a forward pass where no run says how many fit


@contextmanager
def as_the_run_evaluates(opened: OpenModel, data: PreparedData, most: int | None) -> Iterator[Layout]:
    """Inside, the model takes micro-batches of the layout that is yielded, of all of `data.train`. most: examples or
    pairs of one; None: as many as in the run."""
    plan = opened.plan
    with ExitStack() as undone:
        if plan is None:
            yield Layout(opened.pad_id, most=most or ROWS)
            return
        here = plan.device.value == next(opened.model.parameters()).device.type
        if plan.kernels.loss.value != PLAIN:
            _put_in(undone, loss_path(head_rows(trains=False)), opened.model)
        if (form := plan.kernels.documents.value) != PLAIN:
            longest = int(data.train.lengths.max())
            fits = here and not mask_reason(facts_of(opened.base).window, longest)
            if not (fits and _put_in(undone, packed_attention(form), opened.model)):
                plan = without_packing(plan, "cannot be used here", "hardware")
        layout = whole_layout(plan, data)
        yield layout if most is None else replace(layout, most=most, tokens=None)


def _put_in(undone: ExitStack, path: FastPath, model: nn.Module) -> bool:
    if path.obstacle(model):
        return False
    undone.callback(path.install(model))
    return True
