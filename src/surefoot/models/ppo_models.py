"""The four parts of PPO and who plays them: actor, critic, reference, reward model.

    shared     one trunk: actor and critic are adapters of it, the reference is the trunk without one (or a frozen
               adapter, where the policy to stay close to is one itself), the reward model a frozen adapter with a head
    two        a trunk for actor and reference, and another for critic and reward model, whose base is another
    separate   a model for each, as full fine-tuning needs it

and anything between. What learns is registered in the module with the trunk that it plays on, so that an engine holds
it; what is frozen and stands apart is not. Frozen parts run without gradients and without dropout, and those apart can
wait in host memory while they are not asked.

Shapes: B rows, T tokens of the longest one, N places asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.data.batch import Batch
from surefoot.models.forward import logits_at, output_head
from surefoot.models.modes import evaluating
from surefoot.models.shared_backbone import Trunk
from surefoot.models.value_head import ScoredModel


@dataclass(frozen=True)
class Part:
    """model: a language model as transformers or PEFT made it. adapter: which one of the trunk's, None for its base; of
    a model that stands apart it means nothing."""

    model: nn.Module
    adapter: str | None = None


@dataclass(frozen=True)
class ScoredPart:
    """model: on the trunk its backbone is the trunk's model and the head is the part's own."""

    model: ScoredModel
    adapter: str | None = None


class Cast(nn.Module):
    """trunk: of the actor. critic_trunk: of the critic, where that is another. A part whose model, or scored model's
    backbone, is a trunk's model plays on it; any other stands apart. reward: None where scores come from elsewhere.
    offload: frozen models that stand apart wait in host memory and come to the actor's device to be asked.

    Parameters are named trunk.…, critic_trunk.… and critic_head.… of parts on trunks, actor.… and critic.… of those
    apart.
    Raises ValueError where a frozen part would learn, or two parts would learn the same parameters.
    """

    def __init__(
        self,
        *,
        actor: Part,
        critic: ScoredPart,
        reference: Part,
        reward: ScoredPart | None = None,
        trunk: Trunk | None = None,
        critic_trunk: Trunk | None = None,
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
            raise ValueError("the actor plays on the trunk, where there is one")
        if critic_trunk is not None:
            self.critic_trunk = critic_trunk.model
        if self._trunk_of(critic):
            self.critic_head = critic.model.v_head
        else:
            self.critic = critic.model
        self._guests: dict[int, _Guest] = {}
        for part in (reference, *([reward] if reward else [])):
            self._freeze(part, offload)
        self._rest_critics_output()
        if both := self.actor_parameters & self.critic_parameters:
            raise ValueError(f"actor and critic would both learn {min(both)}")

    @property
    def actor_parameters(self) -> frozenset[str]:
        """Names of what the actor learns."""
        return self._learned(self._actor, "actor")

    @property
    def critic_parameters(self) -> frozenset[str]:
        """Names of what the critic learns, its head included."""
        head = {name for name, one in self.named_parameters() if one.requires_grad and name.startswith("critic_head.")}
        return self._learned(self._critic, "critic") | head

    def actor_logits_at(self, batch: Batch, places: torch.Tensor) -> torch.Tensor:
        """[N, V], differentiable; see `forward.logits_at`."""
        with self._playing(self._actor):
            return logits_at(self._actor.model, batch, places)

    def values(self, batch: Batch, read: torch.Tensor | None = None) -> torch.Tensor:
        """The critic's, [B, T] fp32, differentiable; those of padding mean nothing. read: as in `ScoredModel`."""
        with self._playing(self._critic):
            return self._critic.model.values(batch, read)

    def reference_logits_at(self, batch: Batch, places: torch.Tensor) -> torch.Tensor:
        """[N, V]."""
        with self._asked(self._reference):
            return logits_at(self._reference.model, batch, places)

    @property
    def has_reward(self) -> bool:
        """Whether a model of the cast gives the scores."""
        return self._reward is not None

    def scores(self, batch: Batch) -> torch.Tensor:
        """The reward model's, [B] fp32: at the last token of each row."""
        if self._reward is None:
            raise ValueError("scores come from elsewhere: this cast has no reward model")
        with self._asked(self._reward):
            rows, last = torch.arange(len(batch.input_ids), device=batch.input_ids.device), last_places(batch)
            values = self._reward.model.values(batch, rows * batch.input_ids.shape[1] + last)
        return values[rows, last]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Inside, actor and critic do not learn either: no gradients, no dropout, as when answers are written and
        weighed. Frozen models that stand apart stay on the device."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(self))
            stack.enter_context(self.at_hand())
            yield

    @contextmanager
    def acting(self) -> Iterator[nn.Module]:
        """The actor's language model, heard as the actor and still, to answer prompts."""
        with torch.no_grad(), evaluating(self), self._playing(self._actor):
            yield self._actor.model

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Inside, offloaded models come to the device once, not for every batch."""
        with ExitStack() as stack:
            for guest in self._guests.values():
                stack.enter_context(guest.at(self._device))
            yield

    @property
    def _device(self) -> torch.device:
        return next(self._actor.model.parameters()).device

    def _trunk_of(self, part: Part | ScoredPart) -> Trunk | None:
        return next((one for one in self._trunks.values() if _language_model(part) is one.model), None)

    def _playing(self, part: Part | ScoredPart) -> AbstractContextManager[None]:
        trunk = self._trunk_of(part)
        return trunk.playing(part.adapter) if trunk else nullcontext()

    @contextmanager
    def _asked(self, part: Part | ScoredPart) -> Iterator[None]:
        guest = self._guests.get(id(part.model))
        with (
            torch.no_grad(),
            evaluating(part.model),
            guest.at(self._device) if guest else nullcontext(),
            self._playing(part),
        ):
            yield

    def _freeze(self, part: Part | ScoredPart, offload: bool) -> None:
        if not self._trunk_of(part):
            if part.model in (self._actor.model, self._critic.model):
                raise ValueError("a part that learns cannot be frozen as well")
            part.model.requires_grad_(False)
            if offload:
                self._guests[id(part.model)] = _Guest(part.model)
            return
        if isinstance(part, ScoredPart):
            part.model.v_head.requires_grad_(False)
        if any(self.get_parameter(name).requires_grad for name in self._of_adapter(part)):
            raise ValueError(f"adapter {part.adapter} learns, and a frozen part would play it")

    def _rest_critics_output(self) -> None:
        """Values need no logits, so what only the critic's output head holds would never get a gradient."""
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

    def _of_adapter(self, part: Part | ScoredPart) -> frozenset[str]:
        """Names of what belongs to the adapter that the part plays on its trunk."""
        if part.adapter is None:
            return frozenset()
        return frozenset(
            f"{place}.{name}"
            for place, trunk in self._trunks.items()
            if trunk is self._trunk_of(part)
            for name in trunk.parameters_of(part.adapter)
        )

    def _learned(self, part: Part | ScoredPart, apart: str) -> frozenset[str]:
        own = self._of_adapter(part) if self._trunk_of(part) else None
        return frozenset(
            name
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and (name.startswith(f"{apart}.") if own is None else name in own)
        )


def last_places(batch: Batch) -> torch.Tensor:
    """Of each row the position of its last real token, [B]."""
    if batch.attention_mask is not None:
        return batch.attention_mask.cumsum(dim=1).argmax(dim=1)
    return torch.tensor(batch.lengths, device=batch.input_ids.device) - 1


class _Guest:
    """A model that waits in host memory and is on the device while anybody asks it."""

    def __init__(self, model: nn.Module):
        self._model = model.cpu()
        self._visits = 0

    @contextmanager
    def at(self, device: torch.device) -> Iterator[None]:
        if not self._visits:
            self._model.to(device)
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if not self._visits:
                self._model.cpu()


def _language_model(part: Part | ScoredPart) -> nn.Module:
    return part.model.backbone if isinstance(part, ScoredPart) else part.model
