"""The critic's start and the reward model of stage ppo: on the policy's trunk where they can be, else apart.

On the trunk a reward model is one more adapter over the same base, and the base is in memory once. That takes an
adapter of the policy's own, a reward model that is an adapter over the very same base, and the same BOS factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.text_encoder import TextEncoder
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.models.load import load_tokenizer
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.models.tree import facts_of
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, value_head_tensors, value_width
from surefoot.planning.ppo import RoleFacts, Roles
from surefoot.stages.identity import base_fingerprint
from surefoot.stages.open_model import find_parts, saved_bos_scale
from surefoot.stages.open_reward import open_reward
from surefoot.stages.ppo.scores import reward_model
from surefoot.stages.provenance import saved_plan


@dataclass(frozen=True)
class Source:
    """A reward model as somebody saved it. saved: its adapter where it can play on the policy's trunk, else None.
    parameters: of that adapter, else of the whole model."""

    path: str
    trained: Path
    saved: SavedAdapter | None
    parameters: int

    def head_for(self, model: nn.Module) -> ValueHead:
        """The saved head, for hidden states of `model`. Raises InputError where it does not fit."""
        head = ValueHead(value_width(model))
        load_value_head(head, self.trained)
        return head.to(next(model.parameters()).device)

    def open(self) -> ScoredModel:
        return open_reward(self.path).model


def critic_source(config: RunConfig, base: Path) -> Source | None:
    """What the critic begins as; None: as the policy, with a head of zeros."""
    path = config.ppo.critic or reward_model(config)
    return None if path is None else _source(path, config, base, "ppo.critic" if config.ppo.critic else "ppo.reward")


def reward_source(config: RunConfig, base: Path) -> Source | None:
    """None where scores come from a function or a server."""
    path = reward_model(config)
    return None if path is None else _source(path, config, base, "ppo.reward")


def find_roles(config: RunConfig, base: Path) -> Roles:
    """The same for the plan. base: folder of the policy's base. Raises InputError for a model that is none, or has
    another tokenizer."""

    def facts(source: Source | None) -> RoleFacts | None:
        return None if source is None else RoleFacts(source.path, source.saved is not None, source.parameters)

    return Roles(facts(critic_source(config, base)), facts(reward_source(config, base)))


def _source(path: str, config: RunConfig, base: Path, key: str) -> Source:
    """Raises InputError for a model without a value head, and for one whose tokenizer is not the policy's."""
    try:
        own_base, saved = find_parts(path, None)
    except EnvironmentFault as error:
        raise EnvironmentFault([Fault(key, f"{one.where} {one.what}", one.fix) for one in error.faults]) from None
    trained = saved.folder if saved else own_base
    value_head_tensors(trained)
    _check_tokenizer(trained, own_base, base, key)
    same_scale = saved_bos_scale(trained, own_base, saved_plan(trained)) == config.bos.scale
    shares = (
        saved is not None and config.adapter is not None and same_scale and config.tokenizer.pad != "add"
    ) and base_fingerprint(own_base) == base_fingerprint(base)
    if saved is not None and shares:
        return Source(path, trained, saved, sum(math.prod(tensor.shape) for tensor in saved.tensors.values()))
    return Source(path, trained, None, facts_of(own_base).parameters)


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
        raise InputError(Fault(key, what, "train a reward model on the policy's own base"))
