"""What PPO adds to a plan: who plays actor, critic, reference and reward model, and what that costs.

With an adapter the parts share one trunk where they have the same base: the reference is the trunk without an adapter,
the critic one more adapter. In full fine-tuning each is a model of its own. Actor and critic go through one backward
pass, so the activations of both are alive at once. The key-value cache of the answers is gone before that, and smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.planning.plan import Choice, PpoPlan
from surefoot.planning.workload import BYTES, Workload

_ADAM = 8  # bytes of state for a parameter that stands for the optimizers that a critic may have


@dataclass(frozen=True)
class RoleFacts:
    """A reward model that the config names. parameters: of the whole model, or of its adapter where it can play on the
    policy's trunk."""

    path: str
    on_trunk: bool
    parameters: int


@dataclass(frozen=True)
class Roles:
    """critic: what it begins as; None: as the policy. reward: None where scores come from a function or a server."""

    critic: RoleFacts | None = None
    reward: RoleFacts | None = None


def plan_ppo(config: RunConfig, roles: Roles, work: Workload) -> tuple[PpoPlan, Workload]:
    """The part of the plan, and the workload with all models in it. Pure."""
    shared = work.adapter is not None
    copy = work.parameters * BYTES[work.precision.compute.value]
    if shared:
        reference = Choice("adapter-off", "the trunk without its adapter", "default")
    else:
        held = work.precision.compute.value
        reference = Choice("model", f"a second copy of the base in {held}: all weights of the policy train", "default")
    critic, learning = _critic(config, roles.critic, work)
    reward, scored = _reward(config, roles.reward, work)
    plan = PpoPlan(
        actor=Choice("adapter" if shared else "model", "the policy that is published", "default"),
        critic=critic,
        reference=reference,
        reward=reward,
        critic_parameters=learning,
    )
    return plan, replace(
        work,
        learning=learning,
        optimizer=work.optimizer + _ADAM * learning,
        beside=work.beside + scored + (0 if shared else copy),
        passes=2,
    )


def _critic(config: RunConfig, facts: RoleFacts | None, work: Workload) -> tuple[Choice[str], int]:
    """The choice, and its parameters that train; of one whose base is frozen, which is seldom, all are counted."""
    source = "user" if config.ppo.critic else "default"
    begins = f"begins as {facts.path}" if facts else "begins as the policy, with a head of zeros"
    if work.adapter is not None and (facts is None or facts.on_trunk):
        learning = work.trainable if facts is None else facts.parameters
        return Choice("adapter", f"a second adapter on the policy's trunk; {begins}", source), learning
    count = work.parameters if facts is None else facts.parameters
    return Choice("model", f"a model of its own; {begins}", source), count


def _reward(config: RunConfig, facts: RoleFacts | None, work: Workload) -> tuple[Choice[str], int]:
    """The choice, and bytes of a model that is frozen."""
    if facts is None:
        named = config.ppo.reward or "a function"
        return Choice(named, "scores come from outside: no reward model is loaded", "user"), 0
    width = BYTES[work.precision.compute.value]
    if facts.on_trunk:
        return Choice("adapter", f"a frozen adapter on the policy's trunk: {facts.path}", "user"), 4 * facts.parameters
    why = "it has another base" if work.adapter else "there is no trunk to share"
    return Choice("model", f"a model of its own, {why}: {facts.path}", "user"), width * facts.parameters
