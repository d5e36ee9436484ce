"""Open whatever a user names as a reward model.

    scorer = open_reward("runs/reward")             # ready to score

Everything but its value head is opened as `surefoot.methods.open_model` opens a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.methods.open_model import OpenModel, find_parts, open_for_use
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, value_head_tensors, value_width
from surefoot.planning.plan import DType


@dataclass(frozen=True)
class OpenReward:
    """A reward model that is ready to score.

    model: in eval mode, its head in fp32.
    opened: the language model in it; the value head is in its `trained`.
    """

    model: ScoredModel
    opened: OpenModel


def open_reward(
    path: str, adapter: str | None = None, *, dtype: DType | None = None, in_run: bool = False
) -> OpenReward:
    """Open a reward model.

    path: folder or hub id of a whole model, or of an adapter, which records its base.
    adapter: an adapter with a value head to put over `path`.
    dtype: dtype of the base; None: as in training.
    in_run: as for `open_for_use`.

    Raises InputError for a model without a value head, before weights are read, and for the errors of `open_for_use`.
    """
    base, saved = find_parts(path, adapter)
    value_head_tensors(saved.folder if saved else base)
    opened = open_for_use(path, adapter, scored=True, held=dtype, in_run=in_run)
    head = ValueHead(value_width(opened.model))
    load_value_head(head, opened.trained)
    head.to(next(opened.model.parameters()).device)
    return OpenReward(ScoredModel(opened.model, head).eval(), opened)
