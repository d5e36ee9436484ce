"""Reward models that a run takes besides its policy: where each lies, its base and head, and whether it reads the
policy's tokens.

Two bases are equal where every file of their weights is, and the BOS factor; a policy with added rows shares its base
with no other model.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.methods.open_model import find_parts, saved_bos_scale
from surefoot.methods.open_reward import OpenReward, open_reward
from surefoot.methods.provenance import saved_plan
from surefoot.models.facts import facts_of
from surefoot.models.folder import base_fingerprint
from surefoot.models.load import load_tokenizer
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.models.value_head import ValueHead, load_value_head, value_head_tensors, value_width
from surefoot.planning.plan import DType, RunPlan
from surefoot.planning.ppo import RoleFacts
from surefoot.system.errors import EnvironmentFault, Fault, InputError


@dataclass(frozen=True)
class Source:
    """A reward model as somebody saved it.

    saved: its adapter, None where it is a whole model.
    folder: of its base.
    base: by which equal bases are known.
    """

    path: str
    folder: Path
    saved: SavedAdapter | None
    base: str

    def head_for(self, model: nn.Module) -> ValueHead:
        """The saved head, for hidden states of `model`. Raises InputError where it does not fit."""
        head = ValueHead(value_width(model))
        load_value_head(head, self.saved.folder if self.saved else self.folder)
        return head.to(next(model.parameters()).device)

    def open(self, dtype: DType | None = None) -> OpenReward:
        """Load the reward model.

        dtype: in which it is held; None: as it was trained.
        """
        return open_reward(self.path, dtype=dtype, in_run=True)

    @property
    def facts(self) -> RoleFacts:
        own = None if self.saved is None else sum(math.prod(tensor.shape) for tensor in self.saved.tensors.values())
        return RoleFacts(self.path, self.base, facts_of(self.folder), own)


def find_source(path: str, key: str) -> Source:
    """Of a reward model that the config names. Its head and tokenizer are not looked at; `checked_source` did, for the
    plan.

    path: a run's folder, a merged model's or a hub id.
    key: of the config, for faults.
    """
    try:
        own_base, saved = find_parts(path, None)
    except EnvironmentFault as error:
        raise EnvironmentFault(
            [replace(one, where=key, what=f"{one.where} {one.what}") for one in error.faults]
        ) from None
    trained = saved.folder if saved else own_base
    return Source(path, own_base, saved, _known(own_base, saved_bos_scale(trained, own_base, saved_plan(trained))))


def checked_source(path: str, base: Path, key: str) -> Source:
    """`find_source`, for a model that nothing has looked at yet.

    base: folder of the policy's base.

    Raises InputError for a model without a value head, and for one whose tokenizer is not the policy's.
    """
    source = find_source(path, key)
    trained = source.saved.folder if source.saved else source.folder
    value_head_tensors(trained)
    _check_tokenizer(trained, source.folder, base, key)
    return source


def _check_tokenizer(trained: Path, own_base: Path, base: Path, key: str) -> None:
    """A score of other tokens than were written says nothing. A padding token of its own changes no id of a text."""
    folder = trained if (trained / "tokenizer.json").is_file() else own_base
    mine, theirs = (TextEncoder(load_tokenizer(one)).tokenizer for one in (base, folder))
    ours, others = mine.get_vocab(), theirs.get_vocab()
    pads = (mine.pad_token, theirs.pad_token)
    different = sorted(
        token for token in ours.keys() | others.keys() if ours.get(token) != others.get(token) and token not in pads
    )
    if different:
        what = (
            f"{folder} has another tokenizer than the policy ({len(different)} tokens differ, first {different[0]!r})"
        )
        raise InputError(Fault(key, what, "train a reward model on the policy's own base", code="SF-TOKENIZER"))


def policy_base(config: RunConfig, base: Path) -> str:
    """By which it is known. With added rows it is another than that of any model that was saved."""
    grown = " with added rows" if config.tokenizer.pad == "add" else ""
    return _known(base, config.bos.scale) + grown


def trained_folder(path: str) -> Path:
    """Where the trained weights of a reward model lie, its head among them."""
    base, saved = find_parts(path, None)
    return saved.folder if saved else base


def weights_fingerprint(path: str) -> str:
    """By which a resumed run knows the weights of a reward model again: its base, and its adapter if it is one."""
    base, saved = find_parts(path, None)
    return " ".join(map(base_fingerprint, (base, saved.folder) if saved else (base,)))


def head_digest(folder: Path) -> str:
    """Of the value head: every training changes it."""
    tensors = sorted(value_head_tensors(folder).items())
    return hashlib.sha256(b"".join(tensor.float().numpy().tobytes() for _, tensor in tensors)).hexdigest()


def frozen_type(plan: RunPlan) -> DType:
    """In which models are held that do not train: the policy's base, where it does not."""
    return plan.precision.compute.value if plan.adapter is None else plan.precision.unpacked


def _known(base: Path, scale: float) -> str:
    return f"{base_fingerprint(base)} x{scale:g}"
