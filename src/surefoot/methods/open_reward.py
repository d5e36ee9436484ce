"""Open a reward model, ready to score: a run of stage reward, or one of another tool.

Read are folders with value_head.safetensors beside a model or an adapter (surefoot, LLaMA-Factory, a converted
DeepSpeed-Chat model), transformers' sequence classifiers with one label (`score.weight`, as TRL writes them), and
DeepSpeed-Chat's own names (`rwtransformer.`, `v_head.weight`) in safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.data.segments import Template
from surefoot.methods.open_model import OpenModel, find_parts, open_for_use
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, value_head_tensors, value_width
from surefoot.planning.plan import DType, RunPlan, TokenizerPlan


@dataclass(frozen=True)
class OpenReward:
    """model: in eval mode, its head in fp32. opened: the language model in it, with all that `OpenModel` tells; its
    `model` is the backbone."""

    model: ScoredModel
    opened: OpenModel

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.opened.tokenizer

    @property
    def template(self) -> Template:
        return self.opened.template

    @property
    def tokens(self) -> TokenizerPlan:
        return self.opened.tokens

    @property
    def plan(self) -> RunPlan | None:
        """Of the run that trained it; None where surefoot did not."""
        return self.opened.plan

    @property
    def base(self) -> Path:
        """Folder of the base model."""
        return self.opened.base

    @property
    def trained(self) -> Path:
        """Folder of the adapter, or `base` where there is none; the value head is here."""
        return self.opened.trained

    @property
    def context(self) -> Callable[[], AbstractContextManager[object]]:
        """To be entered around scoring."""
        return self.opened.context


def open_reward(path: str, adapter: str | None = None, *, dtype: DType | None = None) -> OpenReward:
    """path: a folder or hub id, of a whole model or of an adapter, which records its base. adapter: one to put over
    `path`; it has the value head then. dtype: in which the base is held; None: as it was trained.

    Raises InputError for a model that has no value head, before weights are read, and for what `open_for_use` refuses.
    """
    base, saved = find_parts(path, adapter)
    value_head_tensors(saved.folder if saved else base)
    opened = open_for_use(path, adapter, scored=True, held=dtype)
    head = ValueHead(value_width(opened.model))
    load_value_head(head, opened.trained)
    head.to(next(opened.model.parameters()).device)
    return OpenReward(ScoredModel(opened.model, head).eval(), opened)
