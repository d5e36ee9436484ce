"""Stages dpo and kto: learning from pairs of answers, or from answers labeled good or bad.

The reference is loaded or precomputed before step 1. KTO's KL term is computed before each step from all of its prompts
on all ranks, so that it does not depend on how the step is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from surefoot.config.methods import AlignmentConfig
from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import JudgedBatch, Weighted
from surefoot.data.batching.loader import Layout, all_pairs, filled, for_rank, judged_batches, pair_batches
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.method_facts.losses import joined
from surefoot.methods.examples import task_of_items, with_digests
from surefoot.methods.losses.kto import Weights, kto_loss
from surefoot.methods.losses.logprobs import Reference, answer_logprobs, with_reference
from surefoot.methods.losses.preference import LOSSES, Constants, own_loss, pair_objective
from surefoot.methods.method import LoadedModels, Notify, RunInputs, Task
from surefoot.methods.own_functions import own_function
from surefoot.methods.reference import open_reference
from surefoot.models.modes import inference_mode
from surefoot.planning.plan import RunPlan
from surefoot.planning.reference import CACHED
from surefoot.system.errors import Fault, InputError


def check_config(constants: type[Constants], section: type[AlignmentConfig]) -> None:
    """Check that the config has every constant of the formulas. Raises RuntimeError at import."""
    names = {one.name: one for one in fields(constants)}
    known = {key: field for key, field in section.model_fields.items() if key in names}
    joined(names, known, ("methods.losses.preference.Constants", "config.methods.AlignmentConfig"))


check_config(Constants, AlignmentConfig)


def dpo_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of pairs under a plan."""
    options = config.alignment
    constants = Constants(**{field.name: getattr(options, field.name) for field in fields(Constants)})
    facts = config.loss
    assert facts is not None, "dpo is a family of losses"
    row = LOSSES.get(options.loss) or own_loss(own_function(options.loss, "alignment.loss"), options.loss, facts)
    objective = pair_objective(row, facts, constants, options.sft, prompts=options.sft_prompt)
    batches = pair_batches, all_pairs
    stored = plan.reference is not None and plan.reference.value == CACHED
    return task_of_items(objective, config, plan, data, *(with_digests(*batches) if stored else batches))


def kto_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of judged answers under a plan. `start_kto` adds the KL term of the evaluation."""
    options = config.alignment
    if data.eval is not None and config.checkpoint.best == "reward_margin":
        _require_both(data.eval)
    objective = kto_loss(Weights(options.beta, options.good, options.bad))
    of_step = partial(judged_batches, others=True)
    return task_of_items(objective, config, plan, data, of_step, partial(all_judged, size=plan.batch.size.value))


def start_dpo(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Add the reference, if the loss has one."""
    task, reference = run.task, open_reference(run, loaded, notify)
    return task if reference is None else replace(task, objective=with_reference(task.objective, reference))


def start_kto(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Add the reference, and the KL term of every step and of the evaluation set."""
    task, reference = run.task, open_reference(run, loaded, notify)
    assert reference is not None, "KTO always has one"
    engine, own = loaded.engine, task.eval_batches
    if task.data.mixture.epoch_size % run.plan.batch.size.value == 1:
        notify("the last step of an epoch has only one example, so its KTO KL term cannot be estimated: it counts as 0")

    def ready(step: int, batches: Sequence[Weighted]) -> Sequence[JudgedBatch]:
        judged = [batch for batch in batches if isinstance(batch, JudgedBatch)]
        kl = step_kl(loaded, reference, judged)
        return [replace(batch, kl=kl, others=None) for batch in judged]

    def evaluated() -> Iterator[JudgedBatch]:
        assert own is not None
        mine = (batch for batch in for_rank(own(), engine.rank, engine.world) if isinstance(batch, JudgedBatch))
        kl = step_kl(loaded, reference, mine)
        for batch in own():
            assert isinstance(batch, JudgedBatch)
            yield replace(batch, kl=kl, others=None)

    return replace(
        task,
        objective=with_reference(task.objective, reference),
        ready=ready,
        eval_batches=None if own is None else evaluated,
    )


def step_kl(
    loaded: LoadedModels, reference: Reference, batches: Sequence[JudgedBatch] | Iterator[JudgedBatch]
) -> float:
    """Return max(0, mean of log p/q over the prompts with other prompts' answers), over all ranks. Collective."""
    total, count = 0.0, 0
    for batch in batches:
        if batch.others is None:  # a single example in its step
            continue
        ratio = _ratio(loaded, reference, batch)
        # float64, so that the estimate depends on the micro-batches through the forward pass alone.
        total += float(ratio.sum(dtype=torch.float64)) if batch.weight else 0.0
        count += batch.weight
    total, count = loaded.engine.totals([total, count])
    return max(0.0, total / count) if count else 0.0


def _ratio(loaded: LoadedModels, reference: Reference, batch: JudgedBatch) -> torch.Tensor:
    assert batch.others is not None
    rows, model = batch.others.to(loaded.engine.device), loaded.model
    with loaded.settings.kernels(), loaded.settings.forward(), inference_mode(model):
        return answer_logprobs(model, rows).sums - reference(rows)


def all_judged(dataset: TokenizedDataset, layout: Layout, *, size: int) -> Iterator[JudgedBatch]:
    """Yield the answers of a whole data set in order. Prompts get other answers within groups as large as a training
    step; means over good and bad answers are over all of them."""
    count, good = len(dataset), int(dataset.good.sum())
    shares = [count / part if part else 0.0 for part in (good, count - good)]
    batches = (one for group in _groups(count, size) for one in judged_batches(dataset, group, layout, others=True))
    yield from filled((replace(one, good_share=shares[0], bad_share=shares[1]) for one in batches), layout)


def _require_both(evaluation: TokenizedDataset) -> None:
    """Raise InputError if the evaluation data has only good or only bad answers: a margin needs both."""
    good = int(evaluation.good.sum())
    if good in (0, len(evaluation)):
        what = f"reward_margin needs good and bad answers, and all evaluation answers are {'good' if good else 'bad'}"
        raise InputError(
            Fault(
                "checkpoint.best",
                what,
                "use reward_accuracy or loss, or other evaluation data",
                code="SF-CONFIG-CONFLICT",
            )
        )


def _groups(count: int, size: int) -> list[np.ndarray]:
    """Split into groups of nearly equal size, so that no example is alone."""
    return np.array_split(np.arange(count), max(1, count // size))
