"""A reward model as a stage: the language model of the run with a value head, trained on pairs of answers.

Backbone and head train together at optim.lr; the output head is of no use and stays as it is. A saved reward model is
what any run saves, and value_head.safetensors beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.loader import all_pairs, pair_batches
from surefoot.data.prepare import PreparedData
from surefoot.methods.items import stage_of_items
from surefoot.methods.losses.reward import reward_objective
from surefoot.methods.method import ONE_GROUP, Built, Stage
from surefoot.methods.policy import write_policy
from surefoot.models.folder import resolve_folder
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, save_value_head, value_width
from surefoot.planning.plan import RewardPlan, RunPlan
from surefoot.system.errors import EnvironmentFault, Fault


def reward_stage(config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """The data under a plan."""
    reward = _planned(plan)
    # The plan of memory may change on resume, and with it what keeps no keys and values.
    shared = reward.shared_prompts.value and not plan.memory.gradient_checkpointing.value
    objective = reward_objective(reward.loss.value, center=reward.center, surplus=reward.surplus, shared=shared)
    return stage_of_items(objective, config, plan, data, pair_batches, all_pairs)


def build_reward(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """Raises EnvironmentFault where the head differs from the plan, InputError where the head of reward.init does not
    fit."""
    head = ValueHead(value_width(policy))
    if config.reward.init is not None:
        load_value_head(head, resolve_folder(config.reward.init, None, weights=True))
    head.to(next(policy.parameters()).device)
    # A difference of scores does not have the bias: its gradient is what rounding leaves of 0, and Adam enlarges that.
    head.summary.bias.requires_grad_(_planned(plan).center > 0)
    verified = _verified(head, _planned(plan))

    def write(folder: Path) -> None:
        write_policy(policy, plan, folder)
        save_value_head(head, folder)

    return Built(
        model=ScoredModel(policy, head).train(),
        policy=policy,
        groups=ONE_GROUP,
        write=write,
        load=lambda folder: load_value_head(head, folder),
        verified={"value_head": verified},
    )


def _planned(plan: RunPlan) -> RewardPlan:
    assert plan.reward is not None, "a plan of stage reward has the part"
    return plan.reward


def _verified(head: ValueHead, planned: RewardPlan) -> dict[str, Any]:
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    found = {
        "parameters": sum(parameter.numel() for parameter in trainable),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trainable}),
    }
    expected = {"parameters": planned.head_parameters, "dtypes": ["float32"]}
    if found != expected:
        raise EnvironmentFault(Fault("plan: value head", f"planned {expected}, found {found}"))
    return found
