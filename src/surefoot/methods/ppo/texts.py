"""Texts whose language-modelling loss is mixed into PPO's: as many of them to a step as it has answers.

They are read as data of stage sft, so answers among them are learned as answers and plain texts as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.data.loader import micro_batches
from surefoot.data.order import step_examples
from surefoot.data.prepare import PreparedData
from surefoot.methods.examples import prepare_examples
from surefoot.planning.plan import RunPlan, TokenizerPlan

_OTHER_ORDER = 1  # added to the seed, so that texts and prompts of one file do not go hand in hand


@dataclass(frozen=True)
class TextBatches:
    data: PreparedData
    seed: int
    size: int
    pad_id: int

    @property
    def digest(self) -> str:
        """Of the texts as they were read."""
        return self.data.audit.source.content

    def of_step(self, step: int, most: int) -> list[Batch]:
        """The texts of a step, in at most `most` batches."""
        _, places = step_examples(self.seed + _OTHER_ORDER, step - 1, self.data.mixture, self.size)
        rows = -(-len(places) // most)
        return micro_batches(self.data.train, places, rows, self.pad_id)


def prepare_texts(config: RunConfig, tokens: TokenizerPlan, tokenizer: PreTrainedTokenizerBase) -> PreparedData | None:
    """None where no texts are mixed in. Raises InputError for bad data."""
    if config.ppo.unsup_data == "none":
        return None
    data = config.data.model_copy(update={"train": config.ppo.unsup_data, "eval": "none", "format": "auto"})
    return prepare_examples(config.model_copy(update={"stage": "sft", "data": data}), tokens, tokenizer)


def read_texts(config: RunConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> TextBatches | None:
    data = prepare_texts(config, plan.tokenizer, tokenizer)
    if data is None:
        return None
    return TextBatches(data, config.seed, plan.batch.size.value, plan.tokenizer.pad_id)
