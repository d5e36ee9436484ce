"""Supervised fine-tuning as a stage: which data, which loss, which batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot import process
from surefoot.config.mixture import SourceConfig
from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.hub.files import TO_EVALUATE, Splits
from surefoot.data.kind import Kind
from surefoot.data.layout import Layout
from surefoot.data.loader import all_laid_out, laid_out
from surefoot.data.order import step_examples, steps_per_epoch
from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.sources import SourceSpec
from surefoot.data.tokenise import ReadRecord
from surefoot.errors import Fault, InputError
from surefoot.families.templates import is_file
from surefoot.objectives.sft import sft_loss
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.stages.layout import step_layout, whole_layout
from surefoot.stages.stage import Prepare, Stage


def sft_stage(config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """The data under a plan."""
    train, evaluation, size = data.train, data.eval, plan.batch.size.value
    layout, whole = step_layout(plan, data), whole_layout(plan, data)

    def examples(step: int) -> np.ndarray:
        return step_examples(config.seed, step - 1, data.mixture, size)[1]

    return Stage(
        objective=sft_loss,
        data=data,
        steps_per_epoch=steps_per_epoch(data.mixture.epoch_size, size),
        step_batches=lambda step: laid_out(train, examples(step), layout),
        step_tokens=lambda step: int(train.lengths[examples(step)].sum()),
        eval_batches=None if evaluation is None else lambda: all_laid_out(evaluation, whole),
    )


def prepare_sft(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Read, render, tokenise and audit the data, or find it in the cache; of the plan it needs the tokenizer's part
    alone. For stage pretrain: plain texts, in as many examples as they need. read_record: for sources whose format is
    custom. Raises InputError for bad data."""
    return _prepare(config, tokens, tokenizer, read_record, "answers")


def prepare_pairs(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """As `prepare_sft`, of better and worse answers to one prompt: examples 2i and 2i + 1 are a pair."""
    return _prepare(config, tokens, tokenizer, read_record, "pairs")


def prepare_judged(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """As `prepare_sft`, of answers that are good or bad: see `TokenisedDataset.good`."""
    return _prepare(config, tokens, tokenizer, read_record, "judged")


def prepare_prompts(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """As `prepare_sft`, of prompts alone, each of which leaves room for ppo.max_new_tokens."""
    room = tokens.max_length.value - config.ppo.max_new_tokens
    if room < 1:
        what = f"{config.ppo.max_new_tokens} leave no room for a prompt in {tokens.max_length.value} (data.max_length)"
        raise InputError(Fault("ppo.max_new_tokens", what, "lower it"))
    return _prepare(config, tokens, tokenizer, read_record, "prompts", room)


PREPARE: dict[str, Prepare] = {
    "pretrain": prepare_sft,
    "sft": prepare_sft,
    "reward": prepare_pairs,
    "dpo": prepare_pairs,
    "kto": prepare_judged,
    "ppo": prepare_prompts,
}


def _prepare(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    read_record: ReadRecord | None,
    kind: Kind,
    max_length: int | None = None,
) -> PreparedData:
    """max_length: of an example; None: the planned one."""
    data = config.data
    evaluation = _specs(data.eval, data.format, TO_EVALUATE) if isinstance(data.eval, tuple) else data.eval
    planned = tokens.dialogues or tokens.template.value
    return prepare_data(
        _specs(data.train, data.format, "train"),
        None if evaluation == "none" else evaluation,
        template=data.template if is_file(data.template) else planned,  # a file may have moved
        template_asked=data.template != "auto",
        template_fallbacks=tokens.fallbacks,
        tokenizer=tokenizer,
        bos_id=tokens.bos_id if tokens.bos.value else None,
        pad_id=tokens.pad_id,
        stop_ids=tokens.stop.value,
        max_length=max_length or tokens.max_length.value,
        max_samples=data.max_samples,
        train_on=data.train_on,
        encoding=data.encoding,
        seed=config.seed,
        cache=process.cache_folder(),
        chunks=config.stage == "pretrain",
        read_record=read_record,
        kind=kind,
    )


def _specs(sources: Sequence[SourceConfig], default: str, split: str | Splits) -> list[SourceSpec]:
    """default, split: the format and the split of a source that names none."""
    return [
        SourceSpec(
            source.path,
            format=default if source.format == "auto" else source.format,
            columns=source.columns,
            name=source.name,
            subset=source.subset,
            split=source.split or split,
            revision=source.revision,
            streaming=source.streaming,
            max_samples=source.max_samples,
            weight=source.weight,
            epochs=source.epochs,
            share=None if source.share is None else (tuple(source.share.of), source.share.take),
        )
        for source in sources
    ]


def batches_by_length(dataset: TokenisedDataset, rows: int, pad_id: int) -> Iterator[Batch]:
    """The whole data set in padded rows, longest examples first."""
    return all_laid_out(dataset, Layout(pad_id, most=rows))
