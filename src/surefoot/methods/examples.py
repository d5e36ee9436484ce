"""Prepare the examples of a method from the config's sources and assign them to steps in micro-batches.

`prepare_examples` renders, tokenizes and audits them, or takes them from the cache. `task_of_items` builds the `Task`
from which the training loop gets the batches of a step. They are a function of seed and step, so resume needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.audit import Audit
from surefoot.data.batching.batch import Weighted, digested
from surefoot.data.batching.loader import Layout, all_example_batches, example_batches
from surefoot.data.batching.order import filled_rows, step_examples, steps_per_epoch
from surefoot.data.batching.order import whole as each_once
from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.methods.losses.anchored import anchored_loss
from surefoot.methods.losses.sft import Constants, token_loss
from surefoot.methods.method import Task
from surefoot.methods.own_functions import own_function
from surefoot.methods.rewards.graders import fields_read
from surefoot.methods.sources import evaluated_specs, template_in_use, trained_specs
from surefoot.planning.plan import PLAIN, RunPlan, TokenizerPlan
from surefoot.system import process
from surefoot.system.errors import Fault, InputError
from surefoot.training.objective import Objective


def prepare_examples(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Prepare the examples of config.stage; only the tokenizer part of the plan is needed. Stage pretrain: plain texts,
    split into as many examples as needed; ppo and grpo: prompts that leave room for max_new_tokens of answer.

    read_record: reads the records of sources with `format: custom`.

    Raises InputError for bad data.
    """
    data = config.data
    evaluation = evaluated_specs(config) if isinstance(data.eval, tuple) else data.eval
    planned = tokens.dialogues or tokens.template.value
    learned = data.train_on
    assert learned != "by-record", "resolved before the plan, in surefoot.methods.sources"
    prepared = prepare_data(
        trained_specs(config),
        None if evaluation == "none" else evaluation,
        template=template_in_use(config, planned),
        template_asked=data.template != "auto" or bool(data.template_arguments),
        template_fallbacks=tokens.fallbacks,
        tokenizer=tokenizer,
        bos_id=tokens.bos_id if tokens.bos.value else None,
        pad_id=tokens.pad_id,
        stop_ids=tokens.stop.value,
        max_length=_max_length(config, tokens),
        max_samples=data.max_samples,
        train_on=learned,
        encoding=data.encoding,
        seed=config.seed,
        cache=process.cache_folder(),
        chunks=config.method.plain_texts,
        read_record=read_record or _named_reader(config),
        kind=config.method.records,
        max_pixels=data.max_pixels,
        pictures=config.method.pictures,
        after_prompt=config.method.weighs_answers,
        min_length=data.min_length,
        unique=data.unique,
    )
    prepared = replace(prepared, mixture=replace(prepared.mixture, shuffled=data.order == "shuffled"))
    return _without_read(config, prepared) if config.stage == "grpo" else prepared


def _without_read(config: RunConfig, data: PreparedData) -> PreparedData:
    """Remove the fields that rewards read from the audits' unused ones. A function, a server or an environment may read
    any field."""
    read = [fields_read(term) for term in config.grpo.rewards]
    if not read or None in read or config.grpo.environment is not None:
        return all_fields_read(data)
    return _read(data, {name for fields in read for name in fields or ()}.__contains__)


def all_fields_read(data: PreparedData) -> PreparedData:
    """Remove the unused fields from the audits: a reward that a Python caller passes may read any."""
    return _read(data, lambda name: True)


def _read(data: PreparedData, reads: Callable[[str], bool]) -> PreparedData:
    def seen(audit: Audit) -> Audit:
        unused = tuple(name for name in audit.source.unused if not reads(name))
        return replace(audit, source=replace(audit.source, unused=unused))

    return replace(
        data,
        audit=seen(data.audit),
        eval_audit=None if data.eval_audit is None else seen(data.eval_audit),
        sources=tuple(map(seen, data.sources)),
        eval_sources=tuple(map(seen, data.eval_sources)),
    )


def _named_reader(config: RunConfig) -> ReadRecord | None:
    named = config.functions.record
    return None if named is None else own_function(named, "functions.record")


def _max_length(config: RunConfig, tokens: TokenizerPlan) -> int:
    """Maximum length of an example, in tokens."""
    longest = tokens.max_length.value
    if not config.method.rollouts:
        return longest
    room = longest - config.rollout.max_new_tokens
    if room < 1:
        what = f"{config.rollout.max_new_tokens} leaves no room for a prompt within {longest} tokens (data.max_length)"
        raise InputError(Fault(f"{config.method.section}.max_new_tokens", what, "lower it", code="SF-DATA-LENGTH"))
    return room


def step_layout(plan: RunPlan, data: PreparedData) -> Layout:
    """Layout of one step's examples, pairs or judged answers: packed, or padded with a limit in tokens or items."""
    micro, tokens, pad = plan.batch.micro.value, plan.batch.tokens, plan.tokenizer.pad_id
    most = micro if tokens is None else None
    ranks = plan.parallel.ranks.value
    if plan.kernels.documents.value == PLAIN:
        return Layout(pad, most, tokens, ranks=ranks, alike=plan.parallel.engine.value in ("fsdp2", "deepspeed"))
    longest = int(data.train.lengths.reshape(-1, data.rows_per_item).sum(axis=1).max())
    return Layout(pad, most, tokens or micro * longest, packed=True, ranks=ranks)


def whole_layout(plan: RunPlan, data: PreparedData) -> Layout:
    """Layout for evaluating a whole data set: packed as in training, else padded rows limited by number (the rows are
    sorted, so a batch has similar lengths)."""
    layout = step_layout(plan, data)
    return layout if layout.packed else replace(layout, most=plan.batch.micro.value, tokens=None)


OfStep = Callable[[TokenizedDataset, np.ndarray, Layout], Sequence[Weighted]]
OfAll = Callable[[TokenizedDataset, Layout], Iterator[Weighted]]


def with_digests(of_step: OfStep, of_all: OfAll) -> tuple[OfStep, OfAll]:
    """Return both with the digests of their rows, by which stored values are found. Made here, off the device, they
    cost no step a wait."""
    return (
        lambda dataset, items, layout: [digested(batch) for batch in of_step(dataset, items, layout)],
        lambda dataset, layout: map(digested, of_all(dataset, layout)),
    )


def task_of_items(
    objective: Objective,
    config: RunConfig,
    plan: RunPlan,
    data: PreparedData,
    of_step: OfStep,
    of_all: OfAll,
) -> Task:
    """Build the task of a method whose steps take examples, pairs or judged answers by index.

    of_step: makes micro-batches of the given items of the training data.
    of_all: makes micro-batches of all evaluation data.
    """
    train, evaluation, size = data.train, data.eval, plan.batch.size.value
    layout, whole = step_layout(plan, data), whole_layout(plan, data)
    lengths = train.lengths.reshape(-1, data.rows_per_item)

    mixture, room = data.mixture, config.batch.row_tokens
    rows = () if room is None else filled_rows(config.seed, mixture, train.lengths, room)
    counted = each_once(len(rows), shuffled=mixture.shuffled) if rows else mixture

    def items(step: int) -> np.ndarray:
        places = step_examples(config.seed, step - 1, counted, size)[1]
        return np.concatenate([rows[place] for place in places]) if rows else places

    return Task(
        objective=objective,
        data=data,
        steps_per_epoch=steps_per_epoch(counted.epoch_size, size),
        step_batches=lambda step: of_step(train, items(step), layout),
        step_places=lambda step: data.rows_per_item * items(step),
        step_tokens=lambda step: int(lengths[items(step)].sum()),
        eval_batches=None if evaluation is None else lambda: of_all(evaluation, whole),
    )


def sft_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of stages sft and pretrain under a plan."""
    make = anchored_loss if config.needs_reference else token_loss
    objective = make(config.sft.loss, constants_of(config))
    return task_of_items(objective, config, plan, data, example_batches, all_example_batches)


def constants_of(config: RunConfig) -> Constants:
    given = config.sft
    return Constants(given.alpha, given.top, given.entropy, given.kl)
