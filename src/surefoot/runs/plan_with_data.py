"""The plan of a run whose data is known: example lengths, chat template, and the saved plan of a resumed run.

`make_plan` decides without the data. Packing and the tokens of a micro-batch depend on the lengths of the examples, and
the data decides which template and stop tokens they were rendered with. A resumed run keeps its saved plan, except for
the parts that a changed key affects.

`refit_micro_batches` plans memory again after a fast path was removed before step 1, because micro-batches were sized
for that path. Gradient checkpointing stays as the model was set up; only the micro-batch size can change, which affects
results by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Example
from surefoot.data.batching.loader import Layout, common_beginning
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.families.templates import is_users_own
from surefoot.method_facts.methods import WITHOUT_TURNS
from surefoot.methods.sources import settled
from surefoot.methods.table import functions_of
from surefoot.models.folder import resolve_folder
from surefoot.models.shared_prefix import tokens_with_shared
from surefoot.planning.batch import examples_of_step
from surefoot.planning.fast_paths import EXPERTS
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import fits, usable
from surefoot.planning.parallel import sharder
from surefoot.planning.plan import PLAIN, BatchPlan, Choice, RunPlan, TokenizerPlan
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.runs.parity.fast_paths import SWITCHED
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.requirements import ranks_facts
from surefoot.runs.run_folder import FolderState
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.messages import size_text
from surefoot.training.engine import Engine


def plan_with_data(config: RunConfig) -> tuple[RunPlan, SurefootError | None]:
    """Return the plan on this machine, and why the data could not be read (None if it was read).

    Raises like `make_plan`. Records with `format: custom` are not read."""
    config = settled(config)
    draft = make_plan(config, measure=False)  # raises all conflicts before anything slow starts
    try:
        base = resolve_folder(config.model.path, config.model.revision, weights=False)
        data = functions_of(config.stage).prepare(config, draft.tokenizer, planned_tokenizer(base, draft.tokenizer))
    except SurefootError as error:
        return make_plan(config), error
    return with_template(make_plan(config, lengths=lengths_of(config, data)), data, config), None


_PLANNED = frozenset({"batch.micro", "gradient_checkpointing"})  # keys that may change on resume and affect the plan
_DROPOUT = "model.dropout"  # also; not every attention kernel supports dropout


def plan_of(config: RunConfig, existing: FolderState, lengths: LengthFacts) -> RunPlan:
    """Return the plan of a new or resumed run.

    A resumed run keeps its plan, with three exceptions: batch, memory and ranks are planned again if a related key or
    the number of ranks has changed; dropout and attention if model.dropout has changed; and a fast path is dropped if
    the new engine or dropout does not allow it."""
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
    if sharder(anew.parallel):
        plan = _drop_fast_paths(anew, plan, *SWITCHED)
    if drops:
        plan = _drop_fast_paths(
            anew, replace(plan, dropout=anew.dropout, attention=anew.attention), "documents", "last_block"
        )
    return plan


def as_settled(config: RunConfig, plan: RunPlan) -> RunConfig:
    """Request the plain paths that the plan has settled on, so that the memory forecast counts on no others."""
    kept = {name: PLAIN for name in SWITCHED if getattr(plan.kernels, name).value == PLAIN}
    requested: dict[str, object] = {"kernels": config.kernels.model_copy(update=kept)}
    if plan.kernels.documents.value == PLAIN:
        requested["data"] = config.data.model_copy(update={"packing": "off"})
    return config.model_copy(update=requested)


def other_kernels(existing: FolderState, plan: RunPlan) -> list[str]:
    """Describe the fast paths of the saved plan that the new plan no longer has, with reasons."""
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
    """Drop the named fast paths from `plan` that `anew` does not have, in whole or but for experts."""
    gone = {name: choice for name in names if (choice := getattr(anew.kernels, name)).value in (PLAIN, EXPERTS)}
    gone = {name: choice for name, choice in gone.items() if getattr(plan.kernels, name).value != PLAIN}
    return replace(plan, kernels=replace(plan.kernels, **gone))


def _remedy_on_resume(fault: Fault, drops: bool) -> Fault:
    """Replace the fix of a fault: data.packing and kernels cannot change on resume, so the changed key must go back."""
    if fault.where == "data.packing" and drops:
        return replace(fault, fix=f"leave {_DROPOUT} as it was")
    if fault.where.startswith("kernels."):
        return replace(fault, fix="resume with the engine that the run started with")
    return fault


_MIX = 32  # number of quantiles that represent all lengths
_ROOM = 4096  # tokens of a padded micro-batch if batch.micro is auto; the padding share hardly depends on it
_TYPICAL = 90  # percentile: about the longest of some ten examples in a micro-batch
_STEPS = 64  # random steps to sample


def lengths_of(config: RunConfig, data: PreparedData) -> LengthFacts:
    """Return the length statistics that the plan needs. For rollouts they include the answers still to be generated,
    all of whose tokens carry loss."""
    train, micro = data.train, config.batch.micro
    answer = config.rollout.max_new_tokens if config.method.rollouts else 0
    longest, typical = int(train.lengths.max()), int(np.percentile(train.lengths, _TYPICAL, method="higher"))
    supervised = float((train.supervised_counts / train.lengths).max())
    if config.method.losses and config.alignment.sft_prompt:
        supervised = 1.0
    if answer:
        supervised = answer / (longest + answer)
    elif config.draws:  # in the place of some of the data's answers
        prompts, most = train.lengths - train.supervised_counts, config.rollout.max_new_tokens
        longest, typical = (max(one, int(prompts.max()) + most) for one in (longest, typical))
        supervised = max(supervised, most / (int(prompts.min()) + most))
    quantiles = (np.arange(_MIX) + 0.5) / _MIX
    mix = np.quantile(train.lengths, quantiles, method="nearest")
    per = data.rows_per_item
    layout = Layout(0, tokens=max(_ROOM, longest * per)) if micro == "auto" else Layout(0, most=micro)
    size = examples_of_step(config.batch, float(train.lengths.mean()))
    real, padded, shared = step_tokens(train, per, size, layout)
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
        features=max((sum(picture.tokens for picture in own) for _, own in train.pictures()), default=0),
        texts=len(train) - sum(1 for _ in train.pictures()),
    )


def step_tokens(train: TokenizedDataset, per: int, size: int, layout: Layout) -> tuple[int, int, int]:
    """Count the tokens of a few random steps: real ones; in padded rows; and in padded rows if the common prefix of a
    pair is computed once.

    per: examples per item, two for pairs.
    size: items per step.
    layout: layout of padded rows.
    """
    generator = np.random.default_rng(0)  # fixed seed: every start must give the same plan
    lengths = train.lengths.reshape(-1, per)
    real = padded = shared = 0
    for _ in range(_STEPS):
        own = generator.choice(len(lengths), min(size, len(lengths)), replace=False)
        real += int(lengths[own].sum())
        for group in layout.groups(lengths[own].tolist()):
            items = own[group]
            rows = lengths[items].T.flatten().tolist()  # chosen answers first
            padded += len(rows) * max(rows)
            common = [common_beginning(*_both(train, int(item))) for item in items] if per == 2 else []
            shared += tokens_with_shared(rows, common) if common else len(rows) * max(rows)
    return real, padded, shared


def _both(train: TokenizedDataset, pair: int) -> Sequence[Example]:
    return train[2 * pair], train[2 * pair + 1]


_TEXTS = "the records are texts without turns"


def with_template(plan: RunPlan, data: PreparedData, config: RunConfig) -> RunPlan:
    """Put the template and stop tokens that the examples were rendered with into the plan."""
    tokens = plan.tokenizer
    name, stops = data.template.name, data.template.stop_ids
    if is_users_own(name):
        if not config.data.template_arguments:  # with them, the plan has its text
            tokens = replace(tokens, template=replace(tokens.template, value=name))  # its path now
    elif name != tokens.template.value:
        planned = (
            tokens.template.value if is_on_texts(data) else ""
        )  # evaluation data may have dialogues, also after a resume
        tokens = replace(tokens, template=Choice(name, data.template_reason or _TEXTS, "default"), dialogues=planned)
    if stops != tokens.stop.value:
        reason = f"{tokens.stop.reason}, and what the template writes after an answer"
        tokens = replace(tokens, stop=Choice(stops, reason, tokens.stop.source))
    return replace(plan, tokenizer=tokens)


def carry_template(tokenizer: PreTrainedTokenizerBase, data: PreparedData, tokens: TokenizerPlan) -> None:
    """Set the training template as the tokenizer's chat template, so that other programs prompt the model as in
    training.

    A run on plain texts or on token ids trained no template and keeps the tokenizer's.
    """
    if data.audit.source.layout in WITHOUT_TURNS:
        return
    bos = str(tokenizer.convert_ids_to_tokens(tokens.bos_id)) if tokens.bos.value and tokens.bos_id is not None else ""
    source = data.template.jinja(bos)
    if tokenizer.chat_template is None or tokenizer.get_chat_template() != source:
        tokenizer.chat_template = source


def is_on_texts(data: PreparedData) -> bool:
    """Whether no training record has turns."""
    return data.audit.source.layout == "text"


def refit_micro_batches(run: PreparedRun, settled: RunPlan, engine: Engine, say: Callable[[str], None]) -> RunPlan:
    """Return the plan with the memory forecast of its remaining paths, and smaller micro-batches if it does not fit
    otherwise. Collective: every rank must call it.

    settled: the run's plan without the removed paths.
    say: called with a line about smaller micro-batches or a forecast that does not fit; the plan keeps it.
    """
    # A resumed run keeps its micro-batches: other sizes round differently and give different weights.
    if run.resumed or settled.kernels == run.plan.kernels:
        return settled
    config = as_settled(run.config, settled)
    again = settled.memory.gradient_checkpointing.value
    requested = ("on" if settled.memory.recomputed is None else settled.memory.recomputed) if again else "off"
    config = config.model_copy(update={"gradient_checkpointing": requested})
    anew = make_plan(config, lengths=lengths_of(config, run.task.data), measurements=settled.measurements)
    memory = replace(anew.memory, gradient_checkpointing=settled.memory.gradient_checkpointing)
    batch = _of_the_first_rank(anew.batch, engine)
    # PPO also generates with this size, and its batches depend on it.
    if run.config.method.rollouts or batch.micro.value >= settled.batch.micro.value:
        if fits(memory) or not fits(settled.memory):
            return replace(settled, memory=memory)
        room = size_text(usable(memory.available))
        what = (
            f"batch.micro: with the plain path the forecast is {size_text(memory.total)} of {room}; if memory runs out"
        )
        return _with_caution(replace(settled, memory=memory), f"{what}, lower it", say)
    reason = f"{batch.micro.value} instead of {settled.batch.micro.value}, because a fast path was dropped: "
    reason += f"the plain path needs {size_text(memory.total)}"
    batch = replace(batch, micro=Choice(batch.micro.value, reason, "measured"))
    return _with_caution(replace(settled, memory=memory, batch=batch), f"batch.micro: {reason}", say)


def _of_the_first_rank(batch: BatchPlan, engine: Engine) -> BatchPlan:
    """Use the first rank's batch plan: ranks must take the same number of forward passes, and machines may differ."""
    own = [batch.micro.value, batch.accumulation, batch.tokens or 0]
    micro, accumulation, tokens = (int(total) for total in engine.totals(own if engine.rank == 0 else [0, 0, 0]))
    return replace(batch, micro=replace(batch.micro, value=micro), accumulation=accumulation, tokens=tokens or None)


def _with_caution(plan: RunPlan, line: str, say: Callable[[str], None]) -> RunPlan:
    say(line)
    return replace(plan, cautions=(*plan.cautions, line))
