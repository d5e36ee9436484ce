"""Supervised fine-tuning as a stage: which data, which loss, which batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot import hardware
from surefoot.config.mixture import SourceConfig
from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.hub_files import TO_EVALUATE, Splits
from surefoot.data.kind import Kind
from surefoot.data.loader import micro_batches, packed_batches, padded_batches
from surefoot.data.order import step_examples, steps_per_epoch
from surefoot.data.pack import padding_share
from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.sources import SourceSpec
from surefoot.data.tokenise import ReadRecord
from surefoot.errors import Fault, InputError
from surefoot.families.templates import is_file
from surefoot.objectives.sft import sft_loss
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.packing import PLAIN
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.stages.stage import Prepare, Stage

_MIX = 32  # lengths that stand for all
_ROOM = 4096  # tokens of a padded micro-batch, where its size is left open; the share of padding depends on it little
_TYPICAL = 90  # percentile: about the longest of the ten or so examples of a micro-batch


def sft_stage(config: RunConfig, plan: RunPlan, data: PreparedData) -> Stage:
    """The data under a plan."""
    train, size, micro, pad = data.train, plan.batch.size.value, plan.batch.micro.value, plan.tokenizer.pad_id

    def step_tokens(step: int) -> int:
        _, indices = step_examples(config.seed, step - 1, data.mixture, size)
        return int(train.lengths[indices].sum())

    evaluation = data.eval
    return Stage(
        objective=sft_loss,
        data=data,
        steps_per_epoch=steps_per_epoch(data.mixture.epoch_size, size),
        step_batches=step_layout(config, plan, data),
        step_tokens=step_tokens,
        eval_batches=None if evaluation is None else lambda: batches_by_length(evaluation, micro, pad),
    )


def step_layout(config: RunConfig, plan: RunPlan, data: PreparedData) -> Callable[[int], Sequence[Batch]]:
    """Step (from 1) -> the micro-batches of all ranks, as the plan lays them out."""
    layout = _layout(plan, data.train)

    def step_batches(step: int) -> Sequence[Batch]:
        _, indices = step_examples(config.seed, step - 1, data.mixture, plan.batch.size.value)
        return layout(indices)

    return step_batches


def _layout(plan: RunPlan, train: TokenisedDataset) -> Callable[[Iterable[int]], list[Batch]]:
    """How the examples of a step become micro-batches: packed, padded and counted in tokens, or in examples."""
    micro, tokens, pad = plan.batch.micro, plan.batch.tokens, plan.tokenizer.pad_id
    if plan.kernels.documents.value != PLAIN:
        most = micro.value if tokens is None else None
        room = tokens or micro.value * int(train.lengths.max())
        ranks = plan.parallel.ranks.value
        return lambda indices: packed_batches(train, indices, room, most=most, ranks=ranks)
    if tokens is not None:
        return lambda indices: padded_batches(train, indices, tokens, pad)
    return lambda indices: micro_batches(train, indices, micro.value, pad)


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
        cache=hardware.cache_folder(),
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


def length_facts(
    train: TokenisedDataset, answer: int = 0, *, size: int = 16, micro: int | Literal["auto"] = "auto"
) -> LengthFacts:
    """What the planner wants to know of the examples before it chooses kernels and micro-batches. answer: tokens that
    are yet to be written behind each example, all of which carry loss. size, micro: as in the config, of which the
    share of padding depends."""
    longest, typical = int(train.lengths.max()), int(np.percentile(train.lengths, _TYPICAL, method="higher"))
    supervised = max(train.supervised(index) / train.length(index) for index in range(len(train)))
    if answer:
        supervised = answer / (longest + answer)
    quantiles = (np.arange(_MIX) + 0.5) / _MIX
    mix = np.quantile(train.lengths, quantiles, method="nearest")
    most = None if micro == "auto" else micro
    return LengthFacts(
        longest=longest + answer,
        typical=typical + answer,
        supervised=supervised,
        mean=float(train.lengths.mean()) + answer,
        mix=tuple(int(length) + answer for length in mix),
        padding=padding_share(train.lengths, size, max(_ROOM, longest) if most is None else longest * most, most=most),
    )


def batches_by_length(dataset: TokenisedDataset, rows: int, pad_id: int) -> Iterator[Batch]:
    """The whole data set, longest examples first, so that padding is small and memory runs out at once or never."""
    order = np.argsort(-dataset.lengths, kind="stable")
    for start in range(0, len(order), rows):
        yield from micro_batches(dataset, order[start : start + rows], rows, pad_id)
