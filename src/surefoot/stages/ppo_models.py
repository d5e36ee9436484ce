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
from surefoot.models.cast import Cast, Part, ScoredPart
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.load import load_model
from surefoot.models.peft import PeftModel
from surefoot.models.precision import TORCH_DTYPE
from surefoot.models.roles import Trunk
from surefoot.models.save import load_adapter_weights, save_adapter, save_full
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, save_value_head, value_width
from surefoot.planning.plan import DType, RunPlan
from surefoot.stages.policy import write_policy
from surefoot.stages.stage import ACTOR, CRITIC, Built

CRITIC_FOLDER = "critic"


def build_ppo(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """Actor, critic, reference and reward model around the policy."""
    if isinstance(policy, PeftModel):
        critic = ScoredModel(policy, _head(policy))
        cast = _on_one_trunk(policy, critic)
    else:
        critic = _critic_apart(plan, base, policy)
        cast = _apart(policy, critic, plan, base)
    actor, learned = cast.actor_parameters, cast.critic_parameters
    return Built(
        model=cast,
        policy=policy,
        groups={ACTOR: actor.__contains__, CRITIC: learned.__contains__},
        write=lambda folder: _write(policy, critic, plan, folder),
        load=lambda folder: _load_critic(critic, plan, folder / CRITIC_FOLDER),
        verified={"actor_parameters": len(actor), "critic_parameters": len(learned)},
    )


def _on_one_trunk(policy: PeftModel, critic: ScoredModel) -> Cast:
    trunk = Trunk(policy)
    trunk.add_copy(CRITIC, trainable=True)
    return Cast(
        actor=Part(policy, trunk.now), critic=ScoredPart(critic, CRITIC), reference=Part(policy, None), trunk=trunk
    )


def _apart(policy: nn.Module, critic: ScoredModel, plan: RunPlan, base: Path) -> Cast:
    """The reference is the policy's base once more, as its products are computed."""
    reference = _load(plan, base, plan.precision.compute.value)
    return Cast(actor=Part(policy), critic=ScoredPart(critic), reference=Part(reference))


def _critic_apart(plan: RunPlan, base: Path, policy: nn.Module) -> ScoredModel:
    backbone = _load(plan, base, "fp32")
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(backbone)
    return ScoredModel(backbone, _head(policy)).train()


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


def _write(policy: nn.Module, critic: ScoredModel, plan: RunPlan, folder: Path) -> None:
    write_policy(policy, plan, folder)
    own = folder / CRITIC_FOLDER
    if isinstance(critic.backbone, PeftModel):
        save_adapter(critic.backbone, own, save_embedding=plan.tokenizer.added_rows > 0, name=CRITIC)
    else:
        save_full(critic.backbone, own)
    save_value_head(critic.v_head, own)


def _load_critic(critic: ScoredModel, plan: RunPlan, folder: Path) -> None:
    """Bit for bit as `_write` left it."""
    if isinstance(critic.backbone, PeftModel):
        load_adapter_weights(critic.backbone, folder, save_embedding=plan.tokenizer.added_rows > 0, name=CRITIC)
    else:
        saved = _load(plan, folder, "fp32")
        critic.backbone.load_state_dict(saved.state_dict())
    load_value_head(critic.v_head, folder)
