"""The models of stage ppo: which of them share a trunk, where each begins, how they are written and read.

With an adapter everything plays on one trunk: the actor is its first adapter, the critic a second one, the reference
the trunk without any. In full fine-tuning each is a model of its own. The critic is written beside the policy as a
reward model would be, in the folder `critic`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.config.schema import RunConfig
from surefoot.made_folders import CRITIC_FOLDER
from surefoot.models.adapters import ADAPTER
from surefoot.models.cast import Cast, Part, ScoredPart
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.dropout import set_dropout
from surefoot.models.load import load_model
from surefoot.models.peft import PeftModel
from surefoot.models.precision import TORCH_DTYPE
from surefoot.models.roles import Trunk
from surefoot.models.save import load_adapter_weights, save_adapter, save_full
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, save_value_head, value_width
from surefoot.planning.memory import fits
from surefoot.planning.plan import DType, RunPlan
from surefoot.stages.policy import write_policy
from surefoot.stages.ppo.parts import Source, critic_source, reward_source
from surefoot.stages.stage import ACTOR, CRITIC, Built

REWARD = "reward"  # the reward model's adapter on the trunk


def build_ppo(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """Actor, critic, reference and reward model around the policy. Raises InputError for a critic or a reward model
    that is none, or has another tokenizer."""
    begins, scored = critic_source(config, base), reward_source(config, base)
    trunk = Trunk(policy) if isinstance(policy, PeftModel) else None
    critic = _critic(begins, trunk, plan, base, policy)
    cast = Cast(
        actor=Part(policy, None if trunk is None else trunk.now),
        critic=critic,
        reference=Part(policy if trunk else _load(plan, base, plan.precision.compute.value)),
        reward=None if scored is None else _reward(scored, trunk, policy),
        trunk=trunk,
        offload=plan.device.value != "cpu" and not fits(plan.memory),
    )
    actor, learned = cast.actor_parameters, cast.critic_parameters
    return Built(
        model=cast,
        policy=policy,
        groups={ACTOR: actor.__contains__, CRITIC: learned.__contains__},
        write=lambda folder: _write(policy, critic, plan, folder),
        load=lambda folder: _load_critic(critic, plan, folder / CRITIC_FOLDER),
        verified={"actor_parameters": len(actor), "critic_parameters": len(learned)},
    )


def _critic(begins: Source | None, trunk: Trunk | None, plan: RunPlan, base: Path, policy: nn.Module) -> ScoredPart:
    if trunk is not None and (begins is None or begins.saved is not None):
        if begins is None or begins.saved is None:
            trunk.add_copy(CRITIC, trainable=True)
        else:
            trunk.add_saved(CRITIC, begins.saved, trainable=True)
            own, policys = trunk.model.peft_config[CRITIC], trunk.model.peft_config[ADAPTER]
            own.base_model_name_or_path, own.revision = policys.base_model_name_or_path, policys.revision
        head = _head(policy) if begins is None else begins.head_for(policy)
        return ScoredPart(ScoredModel(trunk.model, head), CRITIC)
    critic = ScoredModel(_load(plan, base, "fp32"), _head(policy)) if begins is None else begins.open()
    for parameter in critic.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(critic.backbone, plan.memory.recomputed)
    set_dropout(critic, 0.0)
    return ScoredPart(critic.train())


def _reward(scored: Source, trunk: Trunk | None, policy: nn.Module) -> ScoredPart:
    if trunk is None or scored.saved is None:
        return ScoredPart(scored.open())
    trunk.add_saved(REWARD, scored.saved, trainable=False)
    return ScoredPart(ScoredModel(trunk.model, scored.head_for(policy)), REWARD)


def _load(plan: RunPlan, folder: Path, dtype: DType) -> PreTrainedModel:
    tokens = plan.tokenizer
    return load_model(
        folder,
        dtype=TORCH_DTYPE[dtype],
        attention_implementation=plan.attention.implementation.value,
        device=torch.device(plan.device.value),
        vocab_rows=tokens.pad_id + 1 if tokens.added_rows else None,
    )


def _head(model: nn.Module) -> ValueHead:
    return ValueHead(value_width(model)).to(next(model.parameters()).device)


def _write(policy: nn.Module, critic: ScoredPart, plan: RunPlan, folder: Path) -> None:
    write_policy(policy, plan, folder)
    own, model = folder / CRITIC_FOLDER, critic.model
    if isinstance(model.backbone, PeftModel):
        save_adapter(model.backbone, own, save_embedding=_embedding(critic, plan), name=critic.adapter or ADAPTER)
    else:
        save_full(model.backbone, own)
    save_value_head(model.v_head, own)


def _load_critic(critic: ScoredPart, plan: RunPlan, folder: Path) -> None:
    """Bit for bit as `_write` left it."""
    model = critic.model
    if isinstance(model.backbone, PeftModel):
        save_embedding = _embedding(critic, plan)
        load_adapter_weights(model.backbone, folder, save_embedding=save_embedding, name=critic.adapter or ADAPTER)
    else:
        model.backbone.load_state_dict(_load(plan, folder, "fp32").state_dict())
    load_value_head(model.v_head, folder)


def _embedding(critic: ScoredPart, plan: RunPlan) -> bool:
    """Whether rows were added to the critic's base: on the trunk those of the policy's."""
    return critic.adapter is not None and plan.tokenizer.added_rows > 0
