"""The reward model: the run's language model with a value head, trained on pairs of answers.

Backbone and head are trained together at optim.lr; the LM head is unused and unchanged. A saved reward model is a saved
run plus value_head.safetensors.

`Ranking` measures how often a reward model prefers the better answer, and whether PPO can rely on it: PPO exploits
errors of the reward model, so one that is hardly better than chance only adds noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import all_pairs, pair_batches
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import task_of_items
from surefoot.methods.losses.reward import reward_objective
from surefoot.methods.method import ONE_GROUP, Built, Task
from surefoot.methods.policy import write_policy
from surefoot.models.folder import resolve_folder
from surefoot.models.value_head import ScoredModel, ValueHead, load_value_head, save_value_head, value_width
from surefoot.planning.parallel import sharder
from surefoot.planning.plan import RewardPlan, RunPlan
from surefoot.report.intervals import wilson
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.messages import counted


def reward_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of the data under a plan."""
    reward = _planned(plan)
    # Gradient checkpointing and sharded weights, which rule out sharing, may be new on resume.
    whole = plan.memory.gradient_checkpointing.value or sharder(plan.parallel)
    shared = reward.shared_prompts.value and not whole
    objective = reward_objective(reward.loss.value, center=reward.center, surplus=reward.surplus, shared=shared)
    return task_of_items(objective, config, plan, data, pair_batches, all_pairs)


def build_reward(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """Add a value head to the policy. Raises EnvironmentFault if the head differs from the plan, InputError if the head
    of reward.init does not fit."""
    head = ValueHead(value_width(policy))
    if config.reward.init is not None:
        load_value_head(head, resolve_folder(config.reward.init, None, weights=True))
    head.to(next(policy.parameters()).device)
    # The bias cancels in a difference of scores: its gradient is rounding noise, which Adam would amplify.
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
        raise EnvironmentFault(Fault("plan: value head", f"planned {expected}, found {found}", code="SF-PLAN-BROKEN"))
    return found


ENOUGH = 0.6  # from guides to RLHF; chance is 0.5
_COIN = 0.5
_TO_DO = "train it on more or cleaner pairs, for longer, or with another optim.lr"


@dataclass(frozen=True)
class Ranking:
    """How often a reward model prefers the better answer.

    accuracy: fraction of pairs whose better answer has the higher score; ties count half.
    pairs: number of pairs.
    """

    accuracy: float
    pairs: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy on such pairs."""
        return wilson(self.accuracy, self.pairs)

    def __str__(self) -> str:
        low, high = self.interval
        share = f"{self.accuracy:.1%} of {counted(self.pairs, 'pair')} (95 % interval {low:.1%} to {high:.1%})"
        return f"the reward model prefers the better answer in {share}"

    @property
    def caution(self) -> str | None:
        """What to do if PPO cannot rely on it; None if it can."""
        if self.accuracy <= ENOUGH:
            fault, to_do = f"PPO needs more than {ENOUGH:.0%}, else it learns the reward model's mistakes", _TO_DO
        elif self.interval[0] <= _COIN:
            fault, to_do = "so few pairs do not tell it from a coin", "measure it on more (surefoot evaluate reward)"
        else:
            return None
        return f"{self}: {fault}; {to_do}"


def evaluated_ranking(results: Mapping[str, Any]) -> Ranking | None:
    """Read the ranking from a reward run's all_results.json; None if no pairs were evaluated."""
    accuracy, pairs = results.get("eval_reward_accuracy"), results.get("eval_pairs")
    return Ranking(accuracy, pairs) if isinstance(accuracy, float) and isinstance(pairs, int) and pairs > 0 else None
