"""The four models of PPO (actor, critic, reference, reward model), some of which may share a backbone.

    shared     one backbone: actor and critic are adapters; the reference is the backbone without adapter (or a frozen
               adapter, if the initial policy is one); the reward model is a frozen adapter with a head
    two        one backbone for actor and reference, another one for critic and reward model, whose base differs
    separate   four models, as in full fine-tuning

and mixtures of these. Trainable models are registered in the module together with their backbones, so that an engine
holds them; separate frozen models are not. Frozen models run without gradients and dropout, and separate ones can be
offloaded to host memory between calls.

Shapes: B rows, T tokens of the longest one, N positions needed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.data.batching.batch import Batch, numbers_on
from surefoot.models.forward import logits_at, output_head
from surefoot.models.modes import eval_mode
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.models.value_head import ScoredModel


@dataclass(frozen=True)
class Role:
    """A language model in one of PPO's roles.

    model: a transformers or PEFT model.
    adapter: name of the backbone's adapter, None for its base; ignored for a separate model.
    """

    model: nn.Module
    adapter: str | None = None


@dataclass(frozen=True)
class ScoringRole:
    """A scoring model in one of PPO's roles.

    model: on a shared backbone, `model.backbone` is the backbone's model, and only the head is separate.
    adapter: as in `Role`.
    """

    model: ScoredModel
    adapter: str | None = None


class PPOModels(nn.Module):
    """Actor, critic, reference and reward model as one module.

    trunk: the actor's shared backbone; None if the actor is a separate model.
    critic_trunk: the critic's shared backbone, if it differs from the actor's.
    reward: None if scores do not come from a reward model.
    offload: whether separate frozen models are kept in host memory and moved to the actor's device for each call.

    A role is on a backbone if its model (or its scoring model's backbone) is that backbone's model. Parameters are
    named trunk.…, critic_trunk.… and critic_head.… on backbones, otherwise actor.… and critic.…; checkpoints use these
    names. Raises ValueError if a frozen model would train, or two roles would train the same parameters.
    """

    def __init__(
        self,
        *,
        actor: Role,
        critic: ScoringRole,
        reference: Role,
        reward: ScoringRole | None = None,
        trunk: SharedBackbone | None = None,
        critic_trunk: SharedBackbone | None = None,
        offload: bool = False,
    ):
        super().__init__()
        self._trunks = {
            name: one for name, one in (("trunk", trunk), ("critic_trunk", critic_trunk)) if one is not None
        }
        self._actor, self._critic, self._reference, self._reward = actor, critic, reference, reward
        if trunk is None:
            self.actor = actor.model
        elif _language_model(actor) is trunk.model:
            self.trunk = actor.model
        else:
            raise ValueError("with a trunk given, the actor must be on it")
        if critic_trunk is not None:
            self.critic_trunk = critic_trunk.model
        if self._trunk_of(critic):
            self.critic_head = critic.model.v_head
        else:
            self.critic = critic.model
        self._offloaded: dict[int, _Offloaded] = {}
        for role in (reference, *([reward] if reward else [])):
            self._freeze(role, offload)
        self._freeze_critics_output()
        if both := self.actor_parameters & self.critic_parameters:
            raise ValueError(f"actor and critic would both train {min(both)}")

    @property
    def actor_parameters(self) -> frozenset[str]:
        """Names of the actor's trainable parameters."""
        return self._trainable(self._actor, "actor")

    @property
    def critic_parameters(self) -> frozenset[str]:
        """Names of the critic's trainable parameters, including its head."""
        head = {name for name, one in self.named_parameters() if one.requires_grad and name.startswith("critic_head.")}
        return self._trainable(self._critic, "critic") | head

    def actor_logits_at(self, batch: Batch, places: torch.Tensor) -> torch.Tensor:
        """Return the actor's logits [N, V] at `places` (see `forward.logits_at`), differentiable."""
        with self._adapter_of(self._actor):
            return logits_at(self._actor.model, batch, places)

    def values(self, batch: Batch, read: torch.Tensor | None = None) -> torch.Tensor:
        """Return the critic's values [B, T] in fp32, differentiable; values at padding are meaningless.

        read: as in `ScoredModel`.
        """
        with self._adapter_of(self._critic):
            return self._critic.model.values(batch, read)

    def reference_logits_at(self, batch: Batch, places: torch.Tensor) -> torch.Tensor:
        """Return the reference's logits [N, V] at `places`, without gradients."""
        with self._frozen_call(self._reference):
            return logits_at(self._reference.model, batch, places)

    @property
    def has_reward(self) -> bool:
        """Whether scores come from a reward model."""
        return self._reward is not None

    def scores(self, batch: Batch) -> torch.Tensor:
        """Return the reward model's scores [B] in fp32, at the last real token of each row."""
        if self._reward is None:
            raise ValueError("there is no reward model")
        with self._frozen_call(self._reward):
            return last_values(self._reward.model, batch)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Context without gradients and dropout in all models, in which offloaded models stay on the device."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self))
            stack.enter_context(self.on_device())
            yield

    @contextmanager
    def actor_inference(self) -> Iterator[nn.Module]:
        """Context with the actor's language model and adapter, without gradients and dropout, for generation."""
        with torch.no_grad(), eval_mode(self), self._adapter_of(self._actor):
            yield self._actor.model

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which offloaded models stay on the device instead of moving for every batch."""
        with ExitStack() as stack:
            for waiting in self._offloaded.values():
                stack.enter_context(waiting.on(self._device))
            yield

    @property
    def _device(self) -> torch.device:
        return next(self._actor.model.parameters()).device

    def _trunk_of(self, role: Role | ScoringRole) -> SharedBackbone | None:
        return next((one for one in self._trunks.values() if _language_model(role) is one.model), None)

    def _adapter_of(self, role: Role | ScoringRole) -> AbstractContextManager[None]:
        trunk = self._trunk_of(role)
        return trunk.use_adapter(role.adapter) if trunk else nullcontext()

    @contextmanager
    def _frozen_call(self, role: Role | ScoringRole) -> Iterator[None]:
        waiting = self._offloaded.get(id(role.model))
        with (
            torch.no_grad(),
            eval_mode(role.model),
            waiting.on(self._device) if waiting else nullcontext(),
            self._adapter_of(role),
        ):
            yield

    def _freeze(self, role: Role | ScoringRole, offload: bool) -> None:
        if not self._trunk_of(role):
            if role.model in (self._actor.model, self._critic.model):
                raise ValueError("a model that trains cannot be frozen as well")
            role.model.requires_grad_(False)
            if offload:
                self._offloaded[id(role.model)] = _Offloaded(role.model)
            return
        if isinstance(role, ScoringRole):
            role.model.v_head.requires_grad_(False)
        if any(self.get_parameter(name).requires_grad for name in self._of_adapter(role)):
            raise ValueError(f"adapter {role.adapter} is trainable, but a frozen role would use it")

    def _freeze_critics_output(self) -> None:
        """Freeze the critic's output head, except for tied weights: values need no logits, so it gets no gradient."""
        head = output_head(self._critic.model)
        inside = set(head.modules())
        others = {
            id(one)
            for module in _language_model(self._critic).modules()
            if module not in inside
            for one in module.parameters(recurse=False)
        }
        own = self._of_adapter(self._critic) if self._trunk_of(self._critic) else None
        for name, parameter in self.named_parameters():
            mine = name.startswith("critic.") if own is None else name in own
            if mine and id(parameter) in set(map(id, head.parameters())) - others:
                parameter.requires_grad = False

    def _of_adapter(self, role: Role | ScoringRole) -> frozenset[str]:
        """Names of the parameters of the role's adapter on its backbone."""
        if role.adapter is None:
            return frozenset()
        return frozenset(
            f"{place}.{name}"
            for place, trunk in self._trunks.items()
            if trunk is self._trunk_of(role)
            for name in trunk.parameters_of(role.adapter)
        )

    def _trainable(self, role: Role | ScoringRole, apart: str) -> frozenset[str]:
        own = self._of_adapter(role) if self._trunk_of(role) else None
        return frozenset(
            name
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and (name.startswith(f"{apart}.") if own is None else name in own)
        )


def last_values(model: ScoredModel, batch: Batch) -> torch.Tensor:
    """[B] in fp32: what a reward model scores, the values at the last real tokens."""
    rows, last = torch.arange(len(batch.input_ids), device=batch.input_ids.device), last_positions(batch)
    return model.values(batch, rows * batch.input_ids.shape[1] + last)[rows, last]


def last_positions(batch: Batch) -> torch.Tensor:
    """Return the position of each row's last real token, [B]; of a blank batch, which has no lengths, any."""
    if batch.attention_mask is not None:
        return batch.attention_mask.cumsum(dim=1).argmax(dim=1)
    rows, width = batch.input_ids.shape
    return numbers_on(batch.input_ids.device, batch.lengths or [width] * rows) - 1


class _Offloaded:
    """A model in host memory that is moved to the device inside of `on`, which can be nested."""

    def __init__(self, model: nn.Module):
        self._model = model.cpu()
        self._users = 0

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        if not self._users:
            self._model.to(device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._model.cpu()


def _language_model(role: Role | ScoringRole) -> nn.Module:
    return role.model.backbone if isinstance(role, ScoringRole) else role.model
