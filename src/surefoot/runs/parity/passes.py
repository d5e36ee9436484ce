"""Forward and backward passes before step 1, over a part of the next step.

Two micro-batches of that step run forward and backward, and a sample of each gradient is kept. An adapter's B is 0
before its first step, and anything multiplied by 0 agrees, so zero matrices temporarily hold small numbers. Weights and
the run's random numbers are unchanged afterwards: each micro-batch seeds its own.

At this point batches lack what a method computes before each step; `with_stand_ins` fills it in. A policy with a
reference is its own reference, which is true before its first step; other values would drive the loss where it has no
slope, and nothing could be compared. KL estimates can be any number, since only shapes or two computations are
compared. PPO's prompts have no answers yet; there the policy predicts the prompts, and the critic runs on them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import IGNORE, Batch, JudgedBatch, PairBatch, PromptBatch, Weighted
from surefoot.data.batching.loader import for_rank
from surefoot.data.batching.subsets import end_of_one, part_within, shortest, with_fewer_targets
from surefoot.methods.losses.logprobs import drawn_logprobs, frozen
from surefoot.methods.method import LoadedModels, Task
from surefoot.models.fast.packing import leak, reason_of
from surefoot.models.forward import hidden_states
from surefoot.models.ppo_models import PPOModels
from surefoot.models.qat import unrounded
from surefoot.planning.parallel import sharder
from surefoot.planning.plan import RunPlan
from surefoot.planning.reference import NONE
from surefoot.runs.parity.differences import Pass
from surefoot.system.errors import EnvironmentFault
from surefoot.training.engine import Engine
from surefoot.training.failure import is_of_the_environment
from surefoot.training.objective import LossSum, Objective
from surefoot.training.routing import AUX_LOSS
from surefoot.training.state import LossScale
from surefoot.training.step import (
    LOSS,
    accumulate_gradients,
    add_gradient,
    draw_number,
    seed_micro_batch,
    step_size,
)


def with_stand_ins(
    objective: Objective, batch: Weighted, device: torch.device, plan: RunPlan
) -> tuple[Objective, Weighted]:
    """Return the objective (or a stand-in) and the batch on the device, with stand-ins for what it lacks."""
    batch = batch.to(device)
    if isinstance(batch, PromptBatch):
        return _prompts, batch
    if isinstance(batch, JudgedBatch) and batch.kl is None:
        batch = replace(batch, kl=0.0)
    if isinstance(batch, PairBatch | JudgedBatch) and batch.reference is None:
        batch = replace(batch, reference=torch.zeros(batch.rows.sequences, device=device))
        if plan.reference is not None and plan.reference.value != NONE:
            return _own_reference(objective), batch
    return objective, batch


def _own_reference(objective: Objective) -> Objective:
    def with_reference(model: nn.Module, batch: PairBatch | JudgedBatch) -> LossSum:
        return objective(model, replace(batch, reference=frozen(model)(batch.rows)))

    return with_reference


def _prompts(model: nn.Module, batch: PromptBatch) -> LossSum:
    """Cross entropy of each prompt's own tokens but those of pictures, plus the critic's values if there is one."""
    ids = batch.rows.input_ids
    real = torch.zeros_like(ids, dtype=torch.bool)  # also of a rank's batch that only fills up
    for row, length in enumerate(batch.rows.lengths):
        real[row, :length] = True
    learned = real if batch.rows.seen is None else real & (batch.rows.seen == 0)
    next_is_real = F.pad(learned[:, 1:], (0, 1))
    if not isinstance(model, PPOModels):
        follows = torch.where(next_is_real, ids.roll(-1, dims=1), IGNORE)
        return LossSum(-drawn_logprobs(model, replace(batch.rows, targets=follows), 1.0, None).tokens.sum())
    places = next_is_real.flatten().nonzero().squeeze(1)
    targets = ids.flatten().index_select(0, places + 1)
    logits = model.actor_logits_at(batch.rows, places)
    values = model.values(batch.rows)[real]
    return LossSum(F.cross_entropy(logits.float(), targets, reduction="sum") + values.float().sum())


_BATCHES = 2
_SHORT = 2  # sequences; enough for fp32, where a formula is wrong for all of them or none
# Tokens of each micro-batch in padded rows, unless one example has more, and supervised tokens in any case: the
# reference pass keeps all their logits, and it should neither delay the run nor need more memory than the steps.
_COMPARED, _LEARNED = 512, 256
_SAMPLE = 65_536  # compared values of a gradient: whole copies would double the memory of full training


def compared_batches(task: Task, engine: Engine, step: int, *, whole: bool = False) -> list[Weighted]:
    """Return the batches to compare: a part of each of this rank's first micro-batches of the step.

    whole: keep all supervised tokens of an example, by which a teacher's stored distributions are found."""
    own = list(for_rank(task.step_batches(step), engine.rank, engine.world))
    parts = [part_within(batch, _COMPARED) for batch in own[:_BATCHES]]
    if whole:
        return parts
    # The plain code keeps up to three times as much for each token as the fast paths, for which there is memory: PEFT's
    # DoRA beside fused kernels took 64 GiB for half of a micro-batch whose step takes 57 (8B, H200).
    most = [max(_COMPARED, batch.tokens // 4) for batch in own]
    parts = [end_of_one(part, tokens) for part, tokens in zip(parts, most, strict=False)]
    return [with_fewer_targets(part, _LEARNED) for part in parts]


def short_batch(task: Task, engine: Engine, step: int, *, whole: bool = False) -> Weighted:
    """Return the batch for fp32: the shortest sequences of this rank's first micro-batch. whole: as above."""
    first, *_ = for_rank(task.step_batches(step), engine.rank, engine.world)
    part = shortest(first, _SHORT)
    return part if whole else with_fewer_targets(part, _LEARNED)


@contextmanager
def nonzero_matrices(engine: Engine) -> Iterator[None]:
    """Fill zero matrices, while the block runs, with numbers that change W by B A by about a tenth: the same on all
    ranks that hold a whole matrix, others in every shard. Collective."""
    parts = [(shape, part) for shape, part in engine.computed_with().values() if len(shape) == 2]
    used = engine.totals([float(part.any()) for _, part in parts])
    zeros = [(shape, part) for (shape, part), some in zip(parts, used, strict=True) if not some]
    # A separate generator, so that the run's random numbers do not change.
    same, own = (torch.Generator().manual_seed(seed) for seed in (0, engine.rank))
    for shape, part in zeros:
        draws = same if part.numel() == shape.numel() else own
        part.copy_(torch.randn(part.shape, generator=draws) * (0.1 / math.sqrt(shape[1])))
    try:
        yield
    finally:
        for _, part in zeros:
            part.zero_()


def one_pass(loaded: LoadedModels, task: Task, batches: Sequence[Weighted], step: int) -> Pass:
    """Run forward and backward with the draws of that step, without the rounding of `precision.qat`: where inputs that
    are rounded to 4 bits differ in their last bit, they may come out half as large. In fp16, use the run's loss scale,
    lowered while gradients overflow: a step would be skipped then, which is not a path's fault."""
    scale = loaded.state.scale
    while True:
        found = _pass_at(loaded, task, batches, step, scale)
        if scale is None or not scale.can_fall or not _overflows(loaded.engine, found):
            return found
        scale = scale.after_overflow()


def loss_and_norm(loaded: LoadedModels, task: Task, batches: Sequence[Weighted]) -> tuple[float, float]:
    """Return the mean loss per weight, with that of the routers, and the norm of the whole gradient of step 1, without
    a step of the optimizer: [2] numbers of one process."""
    engine, settings = loaded.engine, loaded.settings
    weight = max(step_size(engine, batches)[0], 1)
    try:
        with settings.passes(1):
            sums = accumulate_gradients(
                engine, task.objective, batches, weight=weight, step=1, scale=None, settings=settings
            )
        loss = float(sums[LOSS])
        if AUX_LOSS in sums and settings.routing:
            loss += settings.routing.coefficient * float(sums[AUX_LOSS])
        squares = [float(one.double().square().sum()) for one in engine.gradients().values()]
        return loss / weight, math.sqrt(sum(squares))
    finally:
        engine.discard()


def _overflows(engine: Engine, found: Pass) -> bool:
    """Whether gradients overflow on any rank. Not if the loss itself is not finite, which no scale changes.
    Collective."""
    bad = math.isfinite(found.loss) and not all(bool(one.isfinite().all()) for one in found.gradients.values())
    return engine.totals([float(bad)])[0] > 0


def _pass_at(loaded: LoadedModels, task: Task, batches: Sequence[Weighted], step: int, scale: LossScale | None) -> Pass:
    engine = loaded.engine
    weight = max(step_size(engine, batches)[0], 1)
    loss = 0.0
    try:
        for number, batch in enumerate(batches):
            seed_micro_batch(loaded.settings.seed, step, draw_number(engine, number))
            objective, batch = with_stand_ins(task.objective, batch, engine.device, loaded.plan)
            with unrounded(engine.model):
                sums = add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=loaded.settings)
            loss += float(sums[LOSS])
        engine.reduce()
        engine.unscale(scale)
        return Pass(engine.totals([loss])[0], {name: _sample(one) for name, one in engine.gradients().items()})
    # Always: leftover gradients would be added to those of step 1.
    finally:
        engine.discard()


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Evenly spaced values, in fp32. The stride is odd, so that it does not select one column of a matrix whose width
    is a power of two."""
    flat = gradient.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE) | 1].float().clone()


@torch.no_grad()
def leak_of(loaded: LoadedModels, batch: Batch) -> tuple[float, str]:
    """Measure leaks between packed documents: how far the hidden states of other documents change when the first one
    changes, relative to the change of its own, added over the ranks. Also returns why packed rows fail in the model,
    empty if they do not; the ranks agree on that, since none waits for another here. A row with a single document is
    split in half. The rounding of `precision.qat` is off, as its scale may be one of all tokens. Collective."""
    batch = _of_several(batch.to(loaded.engine.device))
    first = batch.documents[0]
    ids = batch.input_ids.clone()
    ids[0, :first] = batch.input_ids[0].flip(0)[:first]
    share, fault = 0.0, ""
    try:
        with loaded.settings.kernels(), loaded.settings.forward(), unrounded(loaded.engine.model):
            one, two = (hidden_states(loaded.engine.model, rows) for rows in (batch, replace(batch, input_ids=ids)))
        share = leak(two[0] - one[0], first)
    except (EnvironmentFault, RuntimeError) as caught:
        # Sharded parameters are gathered within the forward pass: there ranks do wait for each other.
        if is_of_the_environment(caught) or sharder(loaded.plan.parallel):
            raise
        fault = reason_of(caught)
    share, failed = loaded.engine.totals([share, float(bool(fault))])
    return share, fault or ("on another rank" if failed else "")


def _of_several(row: Batch) -> Batch:
    if len(row.documents) > 1:
        return row
    tokens = row.input_ids.shape[1]
    halves = (tokens - tokens // 2, tokens // 2)
    return replace(row, documents=halves, lengths=halves, examples=row.examples * 2)
