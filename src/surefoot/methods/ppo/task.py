"""PPO's data: the prompts of each step, and the texts whose language-modeling loss is mixed in.

Texts are read as SFT data, so answers are learned as answers and plain texts in full, as many per step as there are
answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Batch
from surefoot.data.batching.loader import micro_batches
from surefoot.data.batching.order import step_examples
from surefoot.data.batching.rollouts import Cycles
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.methods.examples import prepare_examples
from surefoot.methods.losses.ppo import PpoSettings, ppo_objective
from surefoot.methods.losses.sft import supervised_places
from surefoot.methods.method import Task
from surefoot.methods.ppo.scores import named_scorer, reward_model
from surefoot.methods.rollouts import prompts_task
from surefoot.models.ppo_models import PPOModels
from surefoot.planning.plan import RunPlan, TokenizerPlan


def ppo_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of prompts under a plan; `start_ppo` adds the models."""
    objective = ppo_objective(settings_of(config), actor_logits, critic_values)
    return prompts_task(
        config, plan, data, cycles_of(config, plan, data), objective, ratio_bound=config.ppo.ratio_bound
    )


def prepare_ppo(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Prepare the prompts. Scorer and texts are also checked here, so that errors appear early."""
    if config.ppo.reward is not None and reward_model(config) is None:
        named_scorer(config.ppo.reward)
    prepare_texts(config, tokens, tokenizer)
    return prepare_examples(config, tokens, tokenizer, read_record=read_record)


def cycles_of(config: RunConfig, plan: RunPlan, data: PreparedData) -> Cycles:
    return Cycles(data.mixture, plan.batch.size.value, config.ppo.rollout_batches, config.ppo.epochs)


def settings_of(config: RunConfig) -> PpoSettings:
    ppo = config.ppo
    return PpoSettings(ppo.ratio_clip, ppo.value_clip, ppo.entropy, ppo.unsup_coef, ppo.temperature)


def actor_logits(models: PPOModels, rows: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [N, V] at the supervised positions, and their targets [N]."""
    places, targets = supervised_places(rows)
    return models.actor_logits_at(rows, places), targets


def critic_values(models: PPOModels, rows: Batch) -> torch.Tensor:
    """Return values [B, T], computed at the supervised positions."""
    return models.values(rows, supervised_places(rows)[0])


_OTHER_ORDER = 1  # added to the seed, so that texts and prompts of the same file have different orders


@dataclass(frozen=True)
class TextBatches:
    data: PreparedData
    seed: int
    size: int
    pad_id: int

    @property
    def digest(self) -> str:
        """Digest of the texts."""
        return self.data.audit.source.content

    def of_step(self, step: int, most: int) -> list[Batch]:
        """Return the texts of a step, in at most `most` batches."""
        _, places = step_examples(self.seed + _OTHER_ORDER, step - 1, self.data.mixture, self.size)
        rows = -(-len(places) // most)
        return micro_batches(self.data.train, places, rows, self.pad_id)


def prepare_texts(config: RunConfig, tokens: TokenizerPlan, tokenizer: PreTrainedTokenizerBase) -> PreparedData | None:
    """Prepare the texts; None if none are mixed in. Raises InputError for bad data."""
    if config.ppo.unsup_data == "none":
        return None
    data = config.data.model_copy(update={"train": config.ppo.unsup_data, "eval": "none", "format": "auto"})
    return prepare_examples(config.model_copy(update={"stage": "sft", "data": data}), tokens, tokenizer)


def read_texts(config: RunConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> TextBatches | None:
    data = prepare_texts(config, plan.tokenizer, tokenizer)
    if data is None:
        return None
    return TextBatches(data, config.seed, plan.batch.size.value, plan.tokenizer.pad_id)
