"""Plan PPO's models: actor, critic, reference and reward model, and their memory.

A base that several models share is stored once (the trunk), with an adapter for each model that differs from it: one
trunk for the policy's base and, if the critic starts from another model, one for that. The reference is a trunk without
its adapter, and so is a reward model that is not an adapter itself. A fully trained model is stored separately. Actor
and critic share one backward pass, so the activations of both exist at once. The KV cache of the answers is freed
before that, and smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.config.sections import AdapterShape
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.adapter import names_to_save, plan_adapter, with_rest
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, Choice, PpoPlan, Source
from surefoot.planning.workload import BYTES, Workload

_ADAM = 8  # bytes of optimizer state per parameter, assumed for the critic
_KEY = "ppo.critic_adapter"


@dataclass(frozen=True)
class RoleFacts:
    """A reward model named in the config.

    base: identifies its base; equal bases have equal values.
    adapter: parameters of its own adapter; None if it is a full model.
    """

    path: str
    base: str
    model: ModelFacts
    adapter: int | None


@dataclass(frozen=True)
class Roles:
    """The models that PPO or GRPO uses besides the policy.

    base: identifies the policy's base, as in `RoleFacts`.
    critic: the model it is initialized from; None: the policy.
    reward: None if scores come from a function or a server.
    rewards: those of `grpo.rewards`, in the order of `GrpoConfig.reward_models`.
    """

    base: str = ""
    critic: RoleFacts | None = None
    reward: RoleFacts | None = None
    rewards: tuple[RoleFacts, ...] = ()


@dataclass(frozen=True)
class _Critic:
    """The planned critic.

    base: base of its trunk; None: it is a full model.
    learning: trained parameters, without the value head.
    idle: parameters of its unused output head, if it is fully trained.
    adapter: adapter to add; None if it has one already, or copies the policy's.
    counted: whether `learning` is exact.
    """

    choice: Choice[str]
    base: str | None
    learning: int
    idle: int = 0
    adapter: AdapterPlan | None = None
    counted: bool = True


def plan_ppo(
    config: RunConfig, roles: Roles, work: Workload, notes: Notes, added_rows: int = 0
) -> tuple[PpoPlan, Workload]:
    """Return PPO's plan, and the workload with all models. added_rows: rows added to the policy's embedding. Pure."""
    actor = work.adapter is not None
    critic = _critic(config, roles, work, notes, added_rows)
    trunks = {base for base in (roles.base if actor else None, critic.base) if base is not None}
    own = critic.base is not None and not (actor and critic.base == roles.base)
    of_critic = roles.critic.model if roles.critic else work.model
    dtype = work.precision.compute.value
    if roles.base in trunks:
        whose = "the trunk" if actor else "the critic's base"
        reference = Choice("adapter-off", f"{whose} without its adapter", "default")
    else:
        reference = Choice("model", f"a second copy of the base in {dtype}: all weights of the policy train", "default")
    whose_trunks = {base: "the critic's" if base == critic.base else "the policy's" for base in trunks}
    if roles.reward:
        reward, scored = _place(roles.reward, work, whose_trunks)
    else:
        named = config.ppo.reward or "a function"
        reward, scored = Choice(named, "scores come from outside; no reward model is loaded", "user"), 0
    plan = PpoPlan(
        actor=Choice("adapter" if actor else "model", "the published policy", "default"),
        critic=critic.choice,
        reference=reference,
        reward=reward,
        critic_parameters=critic.learning,
        critic_adapter=critic.adapter,
        critic_head=of_critic.embedding_width + 1 if critic.counted else None,
    )
    copy = 0 if roles.base in trunks else work.parameters * BYTES[dtype]
    return plan, replace(
        work,
        learning=critic.learning,
        optimizer=work.optimizer + _ADAM * critic.learning,
        under=frozen_bytes(of_critic, work) if own else 0,
        beside=work.beside + 4 * critic.idle + scored + copy,
        passes=2,
    )


def _critic(config: RunConfig, roles: Roles, work: Workload, notes: Notes, added_rows: int) -> _Critic:
    requested, facts = config.ppo.critic_adapter, roles.critic
    source: Source = "user" if config.ppo.critic or requested != "as_policy" else "default"
    begins = f"begins as {facts.path}" if facts else "starts from the policy, with a zero head"
    base = facts.base if facts else roles.base
    there = "the policy's base" if work.adapter and base == roles.base else "a trunk of its own"
    if facts and facts.adapter is not None:
        if requested != "as_policy":
            what = f"{facts.path} is an adapter, and a critic that starts from one keeps training it"
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
        return _Critic(Choice("model", f"a separate model; {begins}", source), None, count, idle)
    usable = _without_head(with_rest(shape, model, head=False), model)
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
    """Remove the output head from the adapter, because values do not need it."""
    if model.tied:
        return shape
    targets = shape.targets
    if targets != "all-linear":
        targets = [name for name in targets if not f".{model.head}".endswith(f".{name}")]
    saved = [name for name in names_to_save(shape) if not model.head.endswith(name)]
    return shape.model_copy(update={"targets": targets, "modules_to_save": saved})


def plan_reward_models(roles: Roles, work: Workload) -> tuple[tuple[Choice[str], ...], Workload]:
    """Return where each reward model of GRPO is loaded, and the workload including them. Pure."""
    trunks = {roles.base: "the policy's"} if work.adapter else {}
    placed = [_place(one, work, trunks) for one in roles.rewards]
    return tuple(choice for choice, _ in placed), replace(work, beside=work.beside + sum(own for _, own in placed))


def _place(facts: RoleFacts, work: Workload, trunks: Mapping[str, str]) -> tuple[Choice[str], int]:
    """Return the choice for a reward model, and bytes of frozen weights stored only for it.

    trunks: bases that are loaded anyway, and whose they are.
    """
    own = 4 * (facts.adapter or 0)
    if facts.base not in trunks:
        why = "no model with an adapter shares its base"
        return Choice("model", f"a separate model, {why}: {facts.path}", "user"), frozen_bytes(facts.model, work) + own
    whose = trunks[facts.base]
    if facts.adapter is None:
        return Choice("adapter-off", f"{whose} base without its adapter: {facts.path}", "user"), 0
    return Choice("adapter", f"a frozen adapter on {whose} base: {facts.path}", "user"), own


def frozen_bytes(model: ModelFacts, work: Workload) -> int:
    """Bytes of a frozen base stored like the policy's, with autocast's cast copies."""
    dtype = work.precision.unpacked if work.adapter else work.precision.compute.value
    linear = sum(module.parameters for module in model.modules if module.linear)
    cast = linear * work.width if work.autocast and dtype == "fp32" else 0
    return model.parameters * BYTES[dtype] + cast
