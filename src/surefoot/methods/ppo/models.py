"""The models of PPO: which share a backbone, what each starts from, how they are saved and loaded.

With an adapter the models share backbones: the actor is the first adapter on the policy's backbone, the reference is
that backbone without adapters. The critic is another adapter there or, if it starts from another model, the first
adapter on that model's backbone, which the reward model shares. In full fine-tuning each is a separate model. The
critic is saved like a reward model, in the subfolder `critic`.

Equal bases are loaded once (`surefoot.planning.ppo`, `surefoot.methods.reward_source`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.config.schema import RunConfig
from surefoot.methods.method import ACTOR, CRITIC, Built
from surefoot.methods.policy import trained_dropout, write_policy
from surefoot.methods.ppo.scores import reward_model
from surefoot.methods.reward_source import (
    Source,
    checked_source,
    find_source,
    frozen_type,
    policy_base,
    weights_fingerprint,
)
from surefoot.models.adapters import ADAPTER, add_adapter
from surefoot.models.bos import install_bos_scaling
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.load import load_model
from surefoot.models.modes import set_dropout
from surefoot.models.peft import PeftModel
from surefoot.models.ppo_models import PPOModels, Role, ScoringRole
from surefoot.models.precision import TORCH_DTYPE, hold_in_fp32
from surefoot.models.save import load_adapter_weights, save_adapter, save_full
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.models.value_head import (
    ScoredModel,
    ValueHead,
    load_value_head,
    save_value_head,
    value_width,
)
from surefoot.planning.memory import fits
from surefoot.planning.plan import DType, PpoPlan, RunPlan
from surefoot.planning.ppo import Roles
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.folders import CRITIC_FOLDER

REWARD = "reward"  # the reward model's adapter on a trunk
_APART = "model"  # value in the plan: a separate model


@dataclass(frozen=True)
class _Critic:
    """The critic and its backbone.

    part: the critic's role.
    trunk: its own backbone; None if it uses the policy's or is a full model.
    base: identity of its backbone's base; None for a full model.
    grown: whether the backbone has added rows, like the policy's.
    """

    part: ScoringRole
    trunk: SharedBackbone | None = None
    base: str | None = None
    grown: bool = False


def build_ppo(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """Build actor, critic, reference and reward model around the policy, as planned. Raises EnvironmentFault if the
    critic's trained parameters differ from the plan."""
    ppo = plan.ppo
    assert ppo is not None
    scored = reward_source(config)
    trunk = SharedBackbone(policy) if isinstance(policy, PeftModel) else None
    critic = _critic(config, plan, ppo, trunk, policy, base)
    trunks = {critic.base: critic.trunk} if critic.trunk else {}
    if trunk:
        trunks[policy_base(config, base)] = trunk
    if ppo.reference.value == _APART:
        reference = _load(plan, base, plan.precision.compute.value)
    else:
        reference = trunks[policy_base(config, base)].model
    reward = None
    if scored and ppo.reward.value == _APART:
        reward = ScoringRole(scored.open(frozen_type(plan)).model)
    elif scored:
        reward = _reward_on(trunks[scored.base], scored)
    models = PPOModels(
        actor=Role(policy, None if trunk is None else trunk.active),
        critic=critic.part,
        reference=Role(reference),
        reward=reward,
        trunk=trunk,
        critic_trunk=critic.trunk,
        offload=plan.device.value != "cpu" and not fits(plan.memory),
    )
    verified = _verified(models, ppo)
    actor, learned = models.actor_parameters, models.critic_parameters
    return Built(
        model=models,
        policy=policy,
        groups={ACTOR: actor.__contains__, CRITIC: learned.__contains__},
        write=lambda folder: _write(policy, critic, plan, folder),
        load=lambda folder: _load_critic(critic, plan, folder / CRITIC_FOLDER),
        verified=verified,
    )


def _critic(
    config: RunConfig, plan: RunPlan, ppo: PpoPlan, trunk: SharedBackbone | None, policy: nn.Module, base: Path
) -> _Critic:
    begins = critic_source(config)
    if ppo.critic.value == _APART:
        return _Critic(_whole_critic(begins, plan, policy, base))
    stands_on, of_policy = begins.base if begins else policy_base(config, base), policy_base(config, base)
    grown = stands_on == of_policy and plan.tokenizer.added_rows > 0
    if trunk is not None and stands_on == of_policy:
        return _Critic(_critic_on_policy(trunk, begins, ppo, config.seed), None, stands_on, grown)
    own = _critic_trunk(begins, config, plan, ppo, base)
    head = _head(own.model) if begins is None else begins.head_for(own.model)
    return _Critic(ScoringRole(ScoredModel(own.model, head), ADAPTER), own, stands_on, grown)


def _critic_on_policy(trunk: SharedBackbone, begins: Source | None, ppo: PpoPlan, seed: int) -> ScoringRole:
    """Add the critic to the policy's backbone."""
    if begins and begins.saved:
        trunk.add_saved(CRITIC, begins.saved, trainable=True)
    elif ppo.critic_adapter:
        trunk.add_new(CRITIC, ppo.critic_adapter, seed=seed, trainable=True)
    else:
        trunk.add_copy(CRITIC, trainable=True)
    own, policys = trunk.model.peft_config[CRITIC], trunk.model.peft_config[ADAPTER]
    own.base_model_name_or_path, own.revision = policys.base_model_name_or_path, policys.revision
    head = _head(trunk.model) if begins is None else begins.head_for(trunk.model)
    return ScoringRole(ScoredModel(trunk.model, head), CRITIC)


def _critic_trunk(begins: Source | None, config: RunConfig, plan: RunPlan, ppo: PpoPlan, base: Path) -> SharedBackbone:
    """Load the backbone of the model that the critic starts from, with the critic as its first adapter."""
    scale = plan.tokenizer.bos_scale.value
    if begins is None:
        model: nn.Module = _load(plan, base, frozen_type(plan))
    else:
        opened = begins.open(frozen_type(plan)).opened
        model, scale = opened.model, opened.bos_scale
    if (share := trained_dropout(config, plan)) is not None:
        set_dropout(model, share)
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(model, plan.memory.recomputed)
    if ppo.critic_adapter is not None:
        assert isinstance(model, PreTrainedModel)
        path, revision = (begins.path, None) if begins else (config.model.path, config.model.revision)
        autocast = plan.precision.compute.value != "fp32"
        model = add_adapter(
            model, ppo.critic_adapter, seed=config.seed, base=path, revision=revision, autocast=autocast
        )
    assert isinstance(model, PeftModel)
    if begins and begins.saved:
        own = model.peft_config[ADAPTER]
        own.base_model_name_or_path, own.revision = begins.saved.base, begins.saved.revision
        hold_in_fp32(model)  # modules_to_save were loaded in the base's dtype
    install_bos_scaling(model, scale)
    return SharedBackbone(model.train())


def _whole_critic(begins: Source | None, plan: RunPlan, policy: nn.Module, base: Path) -> ScoringRole:
    critic = ScoredModel(_load(plan, base, "fp32"), _head(policy)) if begins is None else begins.open().model
    hold_in_fp32(critic)
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(critic.backbone, plan.memory.recomputed)
    set_dropout(critic, 0.0)
    return ScoringRole(critic.train())


def _reward_on(trunk: SharedBackbone, scored: Source) -> ScoringRole:
    name = None
    if scored.saved:
        name = REWARD
        trunk.add_saved(name, scored.saved, trainable=False)
    return ScoringRole(ScoredModel(trunk.model, scored.head_for(trunk.model)), name)


def _verified(models: PPOModels, ppo: PpoPlan) -> dict[str, Any]:
    """Return the numbers of trained tensors, and of the critic's parameters. Raises EnvironmentFault if the critic's
    differ from the plan."""
    actor, learned = models.actor_parameters, models.critic_parameters
    beside = [one.numel() for name, one in models.named_parameters() if one.requires_grad and name not in actor]
    if ppo.critic_head is not None and sum(beside) != ppo.critic_parameters + ppo.critic_head:
        what = f"planned {ppo.critic_parameters:,} and {ppo.critic_head:,} of its value head, found {sum(beside):,}"
        raise EnvironmentFault(Fault("plan: ppo.critic_parameters", what, code="SF-PLAN-BROKEN"))
    return {"actor_parameters": len(actor), "critic_parameters": len(learned), "critic_trainable": sum(beside)}


def _load(plan: RunPlan, folder: Path, dtype: DType) -> PreTrainedModel:
    tokens = plan.tokenizer
    model = load_model(
        folder,
        dtype=TORCH_DTYPE[dtype],
        attention_implementation=plan.attention.implementation.value,
        device=torch.device(plan.device.value),
        vocab_rows=tokens.rows,
    )
    install_bos_scaling(model, tokens.bos_scale.value)
    return model


def _head(model: nn.Module) -> ValueHead:
    return ValueHead(value_width(model)).to(next(model.parameters()).device)


def _write(policy: nn.Module, critic: _Critic, plan: RunPlan, folder: Path) -> None:
    write_policy(policy, plan, folder)
    own, part = folder / CRITIC_FOLDER, critic.part
    if isinstance(part.model.backbone, PeftModel):
        save_adapter(part.model.backbone, own, save_embedding=critic.grown, name=part.adapter or ADAPTER)
    else:
        save_full(part.model.backbone, own)
    save_value_head(part.model.v_head, own)


def _load_critic(critic: _Critic, plan: RunPlan, folder: Path) -> None:
    """Restore bit for bit what `_write` saved."""
    part = critic.part
    if isinstance(part.model.backbone, PeftModel):
        name = part.adapter or ADAPTER
        load_adapter_weights(part.model.backbone, folder, save_embedding=critic.grown, name=name)
    else:
        part.model.backbone.load_state_dict(_load(plan, folder, "fp32").state_dict())
    load_value_head(part.model.v_head, folder)


Find = Callable[[str, str], Source]  # path, key of the config


def critic_source(config: RunConfig, find: Find = find_source) -> Source | None:
    """What the critic starts from; None: the policy, with a zero head."""
    path = config.ppo.critic or reward_model(config)
    return None if path is None else find(path, "ppo.critic" if config.ppo.critic else "ppo.reward")


def reward_source(config: RunConfig, find: Find = find_source) -> Source | None:
    """The reward model; None if scores come from a function or a server."""
    path = reward_model(config)
    return None if path is None else find(path, "ppo.reward")


def find_roles(config: RunConfig, base: Path) -> Roles:
    """Find the critic's and reward's models for the plan.

    base: folder of the policy's base.

    Raises InputError for a model that is not a reward model, or has another tokenizer.
    """
    find = cache(lambda path, key: checked_source(path, base, key))
    critic, reward = critic_source(config, find), reward_source(config, find)
    return Roles(policy_base(config, base), critic and critic.facts, reward and reward.facts)


def fingerprints(config: RunConfig, plan: PpoPlan) -> dict[str, str]:
    """Fingerprints of the models that a resumed run must find unchanged: the reward model, and the base of a critic
    that is an adapter."""
    scored = reward_model(config)
    critic = (config.ppo.critic or scored) if plan.critic.value == "adapter" else None
    named = {"reward": scored, "critic": critic}
    return {part: weights_fingerprint(path) for part, path in named.items() if path is not None}
