"""The plan of a run whose examples are known: their lengths, their chat template, and what a checkpoint had planned.

`make_plan` decides without the data. Whether documents are packed, how, and how many tokens a micro-batch holds depend
on how long the examples are; only the data say which template and stop tokens they were written with; and a resumed run
keeps its saved plan, but for the parts that a changed key asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Example
from surefoot.data.batching.loader import common_beginning
from surefoot.data.batching.packing import Layout
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.dataset import TokenisedDataset
from surefoot.families.templates import is_file
from surefoot.methods.sources import settled
from surefoot.methods.table import functions_of
from surefoot.models.folder import resolve_folder
from surefoot.models.shared_prefix import tokens_with_shared
from surefoot.planning.fast_paths import CUTTING
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.plan import PLAIN, Choice, RunPlan, TokenizerPlan
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.runs.parity.fast_paths import SWITCHED
from surefoot.runs.requirements import ranks_facts
from surefoot.runs.run_folder import FolderState
from surefoot.system.errors import Fault, InputError, SurefootError


def plan_with_data(config: RunConfig) -> tuple[RunPlan, str]:
    """The plan on this machine, and what keeps the data from being read; empty where they were.

    Raises as `make_plan` does. Records that the caller's own function would read are not."""
    config = settled(config)
    draft = make_plan(config, measure=False)  # all conflicts, before anything takes time
    try:
        base = resolve_folder(config.model.path, config.model.revision, weights=False)
        data = functions_of(config.stage).prepare(config, draft.tokenizer, planned_tokenizer(base, draft.tokenizer))
    except SurefootError as error:
        return make_plan(config), str(error)
    return with_template(make_plan(config, lengths=lengths_of(config, data)), data), ""


_PLANNED = frozenset({"batch.micro", "gradient_checkpointing"})  # what may change on resume and is part of the plan
_DROPOUT = "model.dropout"  # the same; not every attention kernel can drop out


def plan_of(config: RunConfig, existing: FolderState, lengths: LengthFacts) -> RunPlan:
    """A resumed run keeps its plan, but for the parts on batch, memory and ranks where a changed key or another number
    of ranks asks for it, and with another dropout those on dropout and attention. A fast path goes where the new
    engine or the new dropout does not allow it."""
    if existing.plan is None:
        return make_plan(config, lengths=lengths)
    now, then = ranks_facts(config).world, existing.plan.parallel.ranks.value
    keys = {change.key for change in existing.changes}
    drops = _DROPOUT in keys
    if not (drops or keys & _PLANNED or any(key.startswith("parallel") for key in keys) or now != then):
        return existing.plan
    try:
        anew = make_plan(as_settled(config, existing.plan), lengths=lengths, measurements=existing.plan.measurements)
    except InputError as error:
        raise InputError([_remedy_on_resume(fault, drops) for fault in error.faults]) from None
    plan = replace(existing.plan, batch=anew.batch, memory=anew.memory, parallel=anew.parallel)
    if anew.parallel.engine.value in CUTTING:
        plan = _drop_fast_paths(anew, plan, *SWITCHED)
    if drops:
        plan = _drop_fast_paths(
            anew, replace(plan, dropout=anew.dropout, attention=anew.attention), "documents", "last_block"
        )
    return plan


def as_settled(config: RunConfig, plan: RunPlan) -> RunConfig:
    """With the plain paths of the plan asked for, so that the forecast of memory counts on no other."""
    kept = {name: PLAIN for name in SWITCHED if getattr(plan.kernels, name).value == PLAIN}
    requested: dict[str, object] = {"kernels": config.kernels.model_copy(update=kept)}
    if plan.kernels.documents.value == PLAIN:
        requested["data"] = config.data.model_copy(update={"packing": "off"})
    return config.model_copy(update=requested)


def other_kernels(existing: FolderState, plan: RunPlan) -> list[str]:
    """Which fast paths of the saved plan this one no longer has, and why."""
    if existing.plan is None:
        return []
    before, now = existing.plan.kernels, plan.kernels
    names = {name: f"kernels.{name}" for name in SWITCHED} | {"documents": "data.packing"}
    return [
        f"{key} was {then.value}, is {choice.value}: {choice.reason}"
        for name, key in names.items()
        if (then := getattr(before, name)).value != (choice := getattr(now, name)).value
    ]


def _drop_fast_paths(anew: RunPlan, plan: RunPlan, *names: str) -> RunPlan:
    """The plan with those of its fast paths plain that are plain in the one made anew."""
    gone = {name: choice for name in names if (choice := getattr(anew.kernels, name)).value == PLAIN}
    gone = {name: choice for name, choice in gone.items() if getattr(plan.kernels, name).value != PLAIN}
    return replace(plan, kernels=replace(plan.kernels, **gone))


def _remedy_on_resume(fault: Fault, drops: bool) -> Fault:
    """data.packing and kernels may not change on resume, so what has to give way is the key that did change."""
    if fault.where == "data.packing" and drops:
        return replace(fault, fix=f"leave {_DROPOUT} as it was")
    if fault.where.startswith("kernels."):
        return replace(fault, fix="resume with the engine that the run had")
    return fault


_MIX = 32  # lengths that stand for all
_ROOM = 4096  # tokens of a padded micro-batch, where its size is left open; the share of padding depends on it little
_TYPICAL = 90  # percentile: about the longest of the ten or so examples of a micro-batch
_STEPS = 64  # drawn


def lengths_of(config: RunConfig, data: PreparedData) -> LengthFacts:
    """What the plan needs to know of the lengths of the run's examples, with what the policy is yet to write behind
    them, all of which carries loss."""
    train, micro = data.train, config.batch.micro
    answer = config.rollout.max_new_tokens if config.method.rollouts else 0
    longest, typical = int(train.lengths.max()), int(np.percentile(train.lengths, _TYPICAL, method="higher"))
    supervised = float((train.supervised_counts / train.lengths).max())
    if answer:
        supervised = answer / (longest + answer)
    quantiles = (np.arange(_MIX) + 0.5) / _MIX
    mix = np.quantile(train.lengths, quantiles, method="nearest")
    per = data.rows_per_item
    layout = Layout(0, tokens=max(_ROOM, longest * per)) if micro == "auto" else Layout(0, most=micro)
    real, padded, shared = step_tokens(train, per, config.batch.size, layout)
    return LengthFacts(
        longest=longest + answer,
        typical=typical + answer,
        supervised=supervised,
        mean=float(train.lengths.mean()) + answer,
        mix=tuple(int(length) + answer for length in mix),
        padding=1 - real / padded,
        shared=shared / padded,
        evaluated=int(data.eval.lengths.max()) if data.eval is not None else 0,
        pictures=any(file.pictures for one in (train, data.eval) if one is not None for file in one.files),
    )


def step_tokens(train: TokenisedDataset, per: int, size: int, layout: Layout) -> tuple[int, int, int]:
    """Tokens of a few random steps: of the examples; in padded rows; and in padded rows, where what both answers of a
    pair begin with is computed once.

    per: examples of an item, two in pairs.
    size: items of a step.
    layout: of padded rows.
    """
    generator = np.random.default_rng(0)  # the same steps at every start, so that the same plan comes out
    lengths = train.lengths.reshape(-1, per)
    real = padded = shared = 0
    for _ in range(_STEPS):
        own = generator.choice(len(lengths), min(size, len(lengths)), replace=False)
        real += int(lengths[own].sum())
        for group in layout.groups(lengths[own].tolist()):
            items = own[group]
            rows = lengths[items].T.flatten().tolist()  # the better answers' first
            padded += len(rows) * max(rows)
            common = [common_beginning(*_both(train, int(item))) for item in items] if per == 2 else []
            shared += tokens_with_shared(rows, common) if common else len(rows) * max(rows)
    return real, padded, shared


def _both(train: TokenisedDataset, pair: int) -> Sequence[Example]:
    return train[2 * pair], train[2 * pair + 1]


_TEXTS = "the records are texts without turns"


def with_template(plan: RunPlan, data: PreparedData) -> RunPlan:
    """The plan with the template and the stop tokens that the examples were really written with."""
    tokens = plan.tokenizer
    name, stops = data.template.name, data.template.stop_ids
    if is_file(name):
        tokens = replace(tokens, template=replace(tokens.template, value=name))  # where it lies now
    elif name != tokens.template.value:
        planned = (
            tokens.template.value if is_on_texts(data) else ""
        )  # evaluation may hold dialogues, after a resume too
        tokens = replace(tokens, template=Choice(name, data.template_reason or _TEXTS, "default"), dialogues=planned)
    if stops != tokens.stop.value:
        reason = f"{tokens.stop.reason}, and what the template writes behind an answer"
        tokens = replace(tokens, stop=Choice(stops, reason, tokens.stop.source))
    return replace(plan, tokenizer=tokens)


def carry_template(tokenizer: PreTrainedTokenizerBase, data: PreparedData, tokens: TokenizerPlan) -> None:
    """From here on the tokenizer's chat template is the one that trains: other programs then ask as the run did.

    A run on texts without turns trained no template, and leaves the tokenizer's own alone.
    """
    if is_on_texts(data):
        return
    bos = str(tokenizer.convert_ids_to_tokens(tokens.bos_id)) if tokens.bos.value and tokens.bos_id is not None else ""
    source = data.template.jinja(bos)
    if tokenizer.chat_template is None or tokenizer.get_chat_template() != source:
        tokenizer.chat_template = source


def is_on_texts(data: PreparedData) -> bool:
    """Whether no record of the training data has turns."""
    return data.audit.source.layout == "text"
