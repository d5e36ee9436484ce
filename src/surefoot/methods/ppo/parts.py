"""The critic's start and the reward model of stage ppo, and on which base each of them stands.

Equal bases are held once (`surefoot.planning.ppo`). Two are equal where every file of their weights is, and the BOS
factor; the policy's is no one else's where rows were added to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.text_encoder import TextEncoder
from surefoot.methods.open_model import find_parts, saved_bos_scale
from surefoot.methods.open_reward import OpenReward, open_reward
from surefoot.methods.ppo.scores import reward_model
from surefoot.methods.provenance import saved_plan
from surefoot.models.facts import facts_of
from surefoot.models.folder import base_fingerprint
from surefoot.models.load import load_tokenizer
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.models.value_head import ValueHead, load_value_head, value_head_tensors, value_width
from surefoot.planning.plan import DType, PpoPlan
from surefoot.planning.ppo import RoleFacts, Roles
from surefoot.system.errors import EnvironmentFault, Fault, InputError


@dataclass(frozen=True)
class Source:
    """A reward model as somebody saved it. saved: its adapter, None where it is a whole model. folder: of its base.
    base: by which equal bases are known."""

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
        """dtype: in which it is held; None: as it was trained."""
        return open_reward(self.path, dtype=dtype)

    @property
    def facts(self) -> RoleFacts:
        own = None if self.saved is None else sum(math.prod(tensor.shape) for tensor in self.saved.tensors.values())
        return RoleFacts(self.path, self.base, facts_of(self.folder), own)


def critic_source(config: RunConfig, base: Path) -> Source | None:
    """What the critic begins as; None: as the policy, with a head of zeros."""
    path = config.ppo.critic or reward_model(config)
    return None if path is None else _source(path, base, "ppo.critic" if config.ppo.critic else "ppo.reward")


def reward_source(config: RunConfig, base: Path) -> Source | None:
    """None where scores come from a function or a server."""
    path = reward_model(config)
    return None if path is None else _source(path, base, "ppo.reward")


def find_roles(config: RunConfig, base: Path) -> Roles:
    """The same for the plan. base: folder of the policy's base. Raises InputError for a model that is none, or has
    another tokenizer."""
    critic, reward = critic_source(config, base), reward_source(config, base)
    return Roles(policy_base(config, base), critic and critic.facts, reward and reward.facts)


def policy_base(config: RunConfig, base: Path) -> str:
    """By which it is known. With added rows it is another than that of any model that was saved."""
    grown = " with added rows" if config.tokenizer.pad == "add" else ""
    return _known(base, config.bos.scale) + grown


def fingerprints(config: RunConfig, plan: PpoPlan) -> dict[str, str]:
    """Of the models that a resumed run has to find again: what scores, and what a critic that is an adapter begins as,
    since it goes on lying over that."""
    scored = reward_model(config)
    critic = (config.ppo.critic or scored) if plan.critic.value == "adapter" else None
    return {part: _fingerprint(path) for part, path in (("reward", scored), ("critic", critic)) if path is not None}


def _fingerprint(path: str) -> str:
    base, saved = find_parts(path, None)
    return " ".join(map(base_fingerprint, (base, saved.folder) if saved else (base,)))


def _known(base: Path, scale: float) -> str:
    return f"{base_fingerprint(base)} x{scale:g}"


def _source(path: str, base: Path, key: str) -> Source:
    """Raises InputError for a model without a value head, and for one whose tokenizer is not the policy's."""
    try:
        own_base, saved = find_parts(path, None)
    except EnvironmentFault as error:
        raise EnvironmentFault([Fault(key, f"{one.where} {one.what}", one.fix) for one in error.faults]) from None
    trained = saved.folder if saved else own_base
    value_head_tensors(trained)
    _check_tokenizer(trained, own_base, base, key)
    return Source(path, own_base, saved, _known(own_base, saved_bos_scale(trained, own_base, saved_plan(trained))))


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
