"""Reward models among GRPO's rewards: where they stand, and what they score.

One that is an adapter over the policy's base, or that base itself, is on the policy's backbone; any other is a model of
its own, which every rank holds whole. Ranks share out the answers, as the weights of the backbone may be shared out
too: then all ranks must make the same number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import for_rank
from surefoot.data.formats.conversation import Picture
from surefoot.methods.grpo.rollout import Passes
from surefoot.methods.method import Built, LoadedModels, RunInputs
from surefoot.methods.policy import policy_alone
from surefoot.methods.reward_source import Source, checked_source, find_source, frozen_type, policy_base
from surefoot.methods.rollouts import answered_batches
from surefoot.models.modes import inference_mode
from surefoot.models.peft import PeftModel
from surefoot.models.ppo_models import last_values
from surefoot.models.rollout import Rollout
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.models.value_head import ScoredModel
from surefoot.planning.plan import RunPlan
from surefoot.planning.ppo import Roles
from surefoot.training.ranks import gather_rows

_ADAPTER, _ALONE = "adapter", "model"  # in the plan


@dataclass(frozen=True)
class RewardModel:
    """name: as the config has it. use: inside, the model's own adapter is active, or none."""

    name: str
    model: ScoredModel
    use: Callable[[], AbstractContextManager[object]] = nullcontext


def find_roles(config: RunConfig, base: Path) -> Roles:
    """For the plan.

    base: folder of the policy's base.

    Raises InputError for a model that is none, or has another tokenizer.
    """
    named: Mapping[str, str] = config.grpo.reward_models
    found = [checked_source(path, base, key) for path, key in named.items()]
    return Roles(policy_base(config, base), rewards=tuple(one.facts for one in found))


def build_grpo(config: RunConfig, plan: RunPlan, policy: nn.Module, base: Path) -> Built:
    """The policy, with the frozen adapters of reward models over its base."""
    placed = enumerate(zip(_sources(config), plan.reward_models, strict=True))
    saved = {_adapter(number): one.saved for number, (one, where) in placed if where.value == _ADAPTER}
    if saved:
        assert isinstance(policy, PeftModel)
        trunk = SharedBackbone(policy)
        for name, adapter in saved.items():
            assert adapter is not None
            trunk.add_saved(name, adapter, trainable=False)
    return policy_alone(policy, plan)


def open_reward_models(run: RunInputs, loaded: LoadedModels) -> tuple[RewardModel, ...]:
    placed = enumerate(zip(_sources(run.config), run.plan.reward_models, strict=True))
    return tuple(_open(source, number, where.value, run.plan, loaded) for number, (source, where) in placed)


def model_scores(
    model: RewardModel, answers: Sequence[Rollout], pictures: Sequence[tuple[Picture, ...]], how: Passes
) -> list[float | None]:
    """Of every rank's answers; None for one without a token. Every rank must ask. pictures: of each prompt."""
    rows = gather_rows(dict(_passed(model, answers, pictures, how)), len(answers), how.totals)
    return [row[0] if row else None for row in rows]


def _passed(
    model: RewardModel, answers: Sequence[Rollout], pictures: Sequence[tuple[Picture, ...]], how: Passes
) -> Iterator[tuple[int, list[float]]]:
    batches = answered_batches(answers, how.layout, pictures, how.processor)
    for batch in for_rank(batches, how.rank, how.world):
        with inference_mode(model.model), model.use(), how.kernels(), how.forward():
            scores = last_values(model.model, batch.to(how.device)).tolist()
        for place, score in zip(batch.examples, scores[: len(batch.examples)], strict=True):  # none in a blank one
            assert isinstance(place, int)
            yield place, [score]


def _open(source: Source, number: int, where: str, plan: RunPlan, loaded: LoadedModels) -> RewardModel:
    if where == _ALONE:
        model = source.open(frozen_type(plan)).model.requires_grad_(False)
        return RewardModel(source.path, model.to(loaded.engine.device))
    assert isinstance(loaded.policy, PeftModel)
    trunk = SharedBackbone(loaded.policy)
    model = ScoredModel(loaded.policy, source.head_for(loaded.policy).to(loaded.engine.device).requires_grad_(False))
    name = _adapter(number) if where == _ADAPTER else None
    return RewardModel(source.path, model, lambda: trunk.use_adapter(name))


def _adapter(number: int) -> str:
    return f"reward_{number}"


def _sources(config: RunConfig) -> list[Source]:
    named: Mapping[str, str] = config.grpo.reward_models
    return [find_source(path, key) for path, key in named.items()]
