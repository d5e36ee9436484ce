"""What PPO adds to a plan: who plays actor, critic, reference and reward model, and what that costs.

A base that several parts have is held once, with an adapter for each of them that differs from it: one trunk of the
policy's base and, where the critic begins as a model of its own, another of that. The reference is a trunk without an
adapter, and so is a reward model that is no adapter itself. What trains in full is a model of its own. Actor and critic
go through one backward pass, so the activations of both are alive at once. The key-value cache of the answers is gone
before that, and smaller.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.config.sections import AdapterShape
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, Choice, PpoPlan, Source
from surefoot.planning.workload import BYTES, Workload

_ADAM = 8  # bytes of state for a parameter that stands for the optimizers that a critic may have
_KEY = "ppo.critic_adapter"


@dataclass(frozen=True)
class RoleFacts:
    """A reward model that the config names.

    base: by which equal bases are known.
    adapter: parameters of its own adapter, None where it is a whole model.
    """

    path: str
    base: str
    model: ModelFacts
    adapter: int | None


@dataclass(frozen=True)
class Roles:
    """The models that PPO takes besides the policy.

    base: of the policy, as in `RoleFacts`.
    critic: what it begins as; None: as the policy.
    reward: None where scores come from a function or a server.
    """

    base: str = ""
    critic: RoleFacts | None = None
    reward: RoleFacts | None = None


@dataclass(frozen=True)
class _Critic:
    """base: of its trunk; None: it is a whole model. learning: parameters that train, without the value head. idle: of
    its output head, which values do not need, where all others train. adapter: that is put in; None also where it has
    one already, or takes a copy of the policy's. counted: whether `learning` is exact."""

    choice: Choice[str]
    base: str | None
    learning: int
    idle: int = 0
    adapter: AdapterPlan | None = None
    counted: bool = True


def plan_ppo(
    config: RunConfig, roles: Roles, work: Workload, notes: Notes, added_rows: int = 0
) -> tuple[PpoPlan, Workload]:
    """The part of the plan, and the workload with all models in it. added_rows: to the policy's embedding. Pure."""
    actor = work.adapter is not None
    critic = _critic(config, roles, work, notes, added_rows)
    trunks = {base for base in (roles.base if actor else None, critic.base) if base is not None}
    own = critic.base is not None and not (actor and critic.base == roles.base)
    of_critic = roles.critic.model if roles.critic else work.model
    held = work.precision.compute.value
    if roles.base in trunks:
        whose = "the trunk" if actor else "the critic's trunk"
        reference = Choice("adapter-off", f"{whose} without its adapter", "default")
    else:
        reference = Choice("model", f"a second copy of the base in {held}: all weights of the policy train", "default")
    reward, scored = _reward(config, roles.reward, critic, work, trunks)
    plan = PpoPlan(
        actor=Choice("adapter" if actor else "model", "the policy that is published", "default"),
        critic=critic.choice,
        reference=reference,
        reward=reward,
        critic_parameters=critic.learning,
        critic_adapter=critic.adapter,
        critic_head=of_critic.embedding_width + 1 if critic.counted else None,
    )
    copy = 0 if roles.base in trunks else work.parameters * BYTES[held]
    return plan, replace(
        work,
        learning=critic.learning,
        optimizer=work.optimizer + _ADAM * critic.learning,
        under=_frozen_bytes(of_critic, work) if own else 0,
        beside=work.beside + 4 * critic.idle + scored + copy,
        passes=2,
    )


def _critic(config: RunConfig, roles: Roles, work: Workload, notes: Notes, added_rows: int) -> _Critic:
    requested, facts = config.ppo.critic_adapter, roles.critic
    source: Source = "user" if config.ppo.critic or requested != "as_policy" else "default"
    begins = f"begins as {facts.path}" if facts else "begins as the policy, with a head of zeros"
    base = facts.base if facts else roles.base
    there = "the policy's trunk" if work.adapter and base == roles.base else "a trunk of its own"
    if facts and facts.adapter is not None:
        if requested != "as_policy":
            what = f"{facts.path} is an adapter, and a critic that begins as one goes on with it"
            notes.refuse(_KEY, what, "leave it out, or merge that model first (surefoot export --merge)")
        return _Critic(
            Choice("adapter", f"its adapter on {there}; {begins}", source), base, facts.adapter, counted=False
        )
    model = facts.model if facts else work.model
    shape = requested if isinstance(requested, AdapterShape) else config.adapter if requested == "as_policy" else None
    if shape is None:
        idle = 0 if model.tied else sum(one.parameters for one in model.modules if one.name == model.head)
        idle += 0 if facts or model.tied else added_rows * model.embedding_width
        count = (facts.model.parameters if facts else work.parameters) - idle
        return _Critic(Choice("model", f"a model of its own; {begins}", source), None, count, idle)
    usable = _without_head(shape, model)
    if facts is None and usable == config.adapter:
        assert work.adapter is not None
        return _Critic(Choice("adapter", f"a second adapter on {there}; {begins}", source), base, work.trainable)
    adapter = plan_adapter(usable, model, 0 if facts else added_rows, notes, _KEY)
    own = work.adapter.parameters if work.adapter and base == roles.base else adapter.parameters
    if adapter.parameters and set(adapter.parameters) != set(own):
        what = "PEFT puts two adapters on the experts of one trunk only where both take the same parameters"
        notes.refuse(_KEY, what, "give both the same experts and router, or the critic experts: false")
    kind = f"{adapter.kind.value} of rank {adapter.rank} on {there}; {begins}"
    return _Critic(Choice("adapter", kind, source), base, adapter.trainable, adapter=adapter)


def _without_head(shape: AdapterShape, model: ModelFacts) -> AdapterShape:
    """Values need no output head: what only it would train is left out."""
    if model.tied:
        return shape
    targets = shape.targets
    if targets != "all-linear":
        targets = [name for name in targets if not f".{model.head}".endswith(f".{name}")]
    saved = [name for name in shape.modules_to_save if not model.head.endswith(name)]
    return shape.model_copy(update={"targets": targets, "modules_to_save": saved})


def _reward(
    config: RunConfig, facts: RoleFacts | None, critic: _Critic, work: Workload, trunks: Collection[str]
) -> tuple[Choice[str], int]:
    """The choice, and bytes of what is frozen and held for it alone. trunks: bases that are there anyhow."""
    if facts is None:
        named = config.ppo.reward or "a function"
        return Choice(named, "scores come from outside: no reward model is loaded", "user"), 0
    own = 4 * (facts.adapter or 0)
    if facts.base not in trunks:
        why = "no part that has an adapter has its base"
        return Choice("model", f"a model of its own, {why}: {facts.path}", "user"), _frozen_bytes(
            facts.model, work
        ) + own
    whose = "the critic's" if facts.base == critic.base else "the policy's"
    if facts.adapter is None:
        return Choice("adapter-off", f"{whose} trunk without its adapter: {facts.path}", "user"), 0
    return Choice("adapter", f"a frozen adapter on {whose} trunk: {facts.path}", "user"), own


def _frozen_bytes(model: ModelFacts, work: Workload) -> int:
    """Of a base that is held as the policy's would be, with the copies that autocast keeps of what is not cast yet."""
    held = work.precision.unpacked if work.adapter else work.precision.compute.value
    linear = sum(module.parameters for module in model.modules if module.linear)
    cast = linear * work.width if work.autocast and held == "fp32" else 0
    return model.parameters * BYTES[held] + cast
