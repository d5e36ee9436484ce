"""Compare the fast paths of a run with the reference code in fp32, where rounding cannot hide a wrong formula.

In 16 bits rounding errors are as large as a small bug: a scale that is off by 2% is well within the limit. In fp32 two
orders of the same sums agree to a few parts per million. The model can run in fp32 temporarily: trainable weights are
fp32 anyway, and widening frozen ones is exact. There are two checks:

    formulas    Every path against the reference code, both in fp32, on two short examples and a decoder with few
                layers: the first layer of each kind, and the last one. A path does the same in every layer of a kind.
                All paths run together; if that differs or fails, each runs alone, to find out which. The limit is
                1e-3, as in `surefoot doctor`. Run whenever possible.
    rounding    Where two passes differ by more than expected in 16 bits: each against the reference code in fp32, on
                the whole model and the same examples. A path about as far from fp32 as the reference code is correct.
                Run only if the result matters.

Afterwards the same tensors are restored and no random number was drawn, so the run is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import Weighted
from surefoot.kernels.packed_attention import ONLY_16_BITS
from surefoot.methods.method import LoadedModels, Task
from surefoot.models.attention import wide_context
from surefoot.models.decoder import few_layers
from surefoot.models.fast import FastPath, Undo
from surefoot.models.fast.packing import NAME, reason_of
from surefoot.models.modes import eager_mode, without_randomness
from surefoot.models.precision import exact_products, widened
from surefoot.planning.memory import usable
from surefoot.planning.parallel import holds_narrow, sharder
from surefoot.planning.plan import RunPlan
from surefoot.runs.parity.differences import LIMITS, Differences, Pass, differences, largest_difference, limits_in
from surefoot.runs.parity.passes import nonzero_matrices, one_pass
from surefoot.system.errors import EnvironmentFault
from surefoot.system.messages import size_text
from surefoot.training.failure import is_of_the_environment

LIMIT = LIMITS["fp32"]
ATTENTION = "attention"
_KEYS = {NAME: "data.packing", ATTENTION: "attention"}  # config keys; others are under `kernels:`


@dataclass(frozen=True)
class Formulas:
    """Result of comparing formulas in fp32.

    compared: config keys of the paths that were compared.
    error: the largest difference, of all together or of the worst one.
    wrong: key -> its difference alone, if too large.
    unseen: key -> why it cannot run in fp32, for example a kernel for 16 bits only.
    """

    compared: tuple[str, ...]
    error: float
    wrong: dict[str, float]
    unseen: dict[str, str]


def compare_formulas(
    loaded: LoadedModels,
    task: Task,
    paths: Sequence[FastPath],
    rows: Sequence[Weighted],
    padded: Sequence[Weighted],
    step: int,
) -> Formulas:
    """Compare paths with the reference code in fp32, together and, if that differs, one by one.

    loaded: an fp32 model without any of the paths; it is left unchanged.
    rows: micro-batches as the run lays them out.
    padded: the same examples in padded rows.
    """
    engine = loaded.engine

    def differ(some: Sequence[FastPath]) -> float | str:
        """Return the difference, or the reason of a failure."""
        batches = rows if any(path.name == NAME for path in some) else padded
        undos: list[Undo] = []
        try:
            undos.extend(path.install(engine.model) for path in some)
            return largest_difference(engine, plain, one_pass(loaded, task, batches, step))
        except (EnvironmentFault, RuntimeError) as caught:
            if is_of_the_environment(caught) or engine.world > 1:  # other ranks wait in the middle of the pass
                raise
            return reason_of(caught)
        finally:
            for undo in reversed(undos):
                undo()

    with without_randomness(engine.model), nonzero_matrices(engine):
        plain = one_pass(loaded, task, padded, step)
        together = differ(paths)
        if isinstance(together, float) and together <= LIMIT:
            return Formulas(tuple(key_of(path.name) for path in paths), together, {}, {})
        alone = {key_of(path.name): differ([path]) for path in paths}
    errors = {key: found for key, found in alone.items() if isinstance(found, float)}
    wrong = {key: error for key, error in errors.items() if not error <= LIMIT}
    if isinstance(together, float) and not wrong:
        wrong = {" with ".join(errors): together}
    return Formulas(
        tuple(errors),
        max(wrong.values(), default=max(errors.values(), default=0.0)),
        wrong,
        {key: found for key, found in alone.items() if isinstance(found, str)},
    )


def key_of(name: str) -> str:
    """The config key of a path."""
    return _KEYS.get(name, f"kernels.{name}")


# How many times as far from fp32 as the reference code a path may be. Two independent roundings are equally far up to
# chance, which for the worst kind of parameters gives factors up to 2.9. A length may be as far off as the reference
# code's gradient, because the reference code's length may match by chance. Measured: docs/evidence/fast-paths.md.
_DISTANCE_LIMIT = 4.0
_LOST = 1.0  # a distance at which nothing of the gradient is left to compare with
_16_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp32Check:
    """Result of the fp32 check.

    found: result for the compared paths; None if the check did not run.
    why: why it did not run; empty in an fp32 run, where the ordinary comparison suffices.
    """

    found: Formulas | None = None
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.found is not None and bool(self.found.wrong)

    def is_right(self, path: FastPath) -> bool:
        """Whether the path was compared in fp32 and is not wrong."""
        return self.found is not None and key_of(path.name) in self.found.compared and self.error_of(path) is None

    def error_of(self, path: FastPath) -> float | None:
        """Difference of a wrong path, alone or together with others; None if it is not wrong."""
        wrong: Mapping[str, float] = {} if self.found is None else self.found.wrong
        return next((error for keys, error in wrong.items() if key_of(path.name) in keys.split(" with ")), None)

    def record(self, path: FastPath) -> dict[str, Any]:
        """The path's entry in environment.json."""
        if self.found is None:
            return {"fp32": {"unseen": self.why}} if self.why else {}
        if key_of(path.name) not in self.found.compared:
            return {"fp32": {"unseen": self.found.unseen.get(key_of(path.name), "it runs in 16 bits only")}}
        error = self.error_of(path)
        return {"fp32": {"differs": self.found.error if error is None else error, "limit": LIMIT}}


def check_in_fp32(
    loaded: LoadedModels, task: Task, paths: Sequence[FastPath], rows: Weighted, padded: Weighted, step: int
) -> Fp32Check:
    """Compare the formulas of paths that are not installed yet. Collective: every rank must call it.

    paths: fast paths; a packed attention that only supports 16 bits is skipped.
    rows: short examples as the run lays them out.
    padded: the same examples in padded rows.
    step: step whose random numbers are drawn.
    """
    if loaded.plan.precision.compute.value == "fp32":
        return Fp32Check()
    paths = [path for path in paths if path.name != NAME or _supports_fp32(loaded)]
    if not paths:
        return Fp32Check(why="it runs in 16 bits only")
    if why := _unsuited(loaded.plan):
        return Fp32Check(why=why)
    with few_layers(loaded.engine.model):
        why = _no_room(loaded)
        if not why and not loaded.engine.totals([float(rows.weight)])[0]:
            why = "the shortest examples have no supervised tokens"
        if why:
            return Fp32Check(why=why)
        try:
            with _in_fp32(loaded) as exact:
                return Fp32Check(compare_formulas(exact, task, paths, [rows], [padded], step))
        except Exception as caught:  # a model with fewer layers than its config may raise anything
            if loaded.engine.world > 1 or (isinstance(caught, RuntimeError) and is_of_the_environment(caught)):
                raise
            said = reason_of(caught) if isinstance(caught, EnvironmentFault | RuntimeError) else repr(caught)
            return Fp32Check(why=f"a part of its decoder does not run in fp32 ({said})")


def rounds_as_plain(
    loaded: LoadedModels, task: Task, batches: Sequence[Weighted], step: int, plain: Pass, other: Pass
) -> dict[str, Any]:
    """Check a pass that differs from the reference by more than the limits: return a record if it is no further from
    fp32 than the reference, else (or if this cannot be measured) an empty one. The model must be in the state in which
    `plain` was computed, on these batches. Collective: every rank must call it."""
    if loaded.plan.precision.compute.value == "fp32" or _unsuited(loaded.plan) or _no_room(loaded):
        return {}
    with _in_fp32(loaded) as exact:
        reference = one_pass(exact, task, batches, step)
    own, its = (differences(loaded.engine, reference, one) for one in (plain, other))
    limits = limits_in(loaded.plan.precision.compute.value)
    allowed = Differences(
        max(limits.gradient, _DISTANCE_LIMIT * own.gradient),
        max(limits.length, own.gradient),
        max(limits.loss, _DISTANCE_LIMIT * own.loss),
    )
    if not max(own.largest, its.largest) < _LOST or its.beyond(allowed):
        return {}
    return {"from_fp32": {"plain": asdict(own), "differs": asdict(its)}}


def _supports_fp32(loaded: LoadedModels) -> bool:
    return loaded.plan.kernels.documents.value not in ONLY_16_BITS


def _unsuited(plan: RunPlan) -> str:
    """Why the plan rules out computing a part of the model in fp32; empty if it does not."""
    if engine := sharder(plan.parallel):
        return f"{engine} shards the weights"
    if holds_narrow(plan.parallel, plan.precision, plan.adapter):
        return f"the device has weights in {plan.precision.compute.value}; those in fp32 are in host memory"
    packed = plan.precision.packed
    return f"a base in {packed} is dequantized to 16 bits" if packed else ""


def _no_room(loaded: LoadedModels) -> str:
    """Why there is no memory to widen the model, the same on all ranks; empty if there is."""
    memory, why = loaded.plan.memory, ""
    needed = sum(4 * one.numel() for one in _narrow(loaded.engine.model))
    used = memory.weights + memory.gradients + memory.beside
    room = max(usable(memory.available) - used, 0) // 2  # the other half is for the pass itself
    if needed > room:
        why = f"its weights need {size_text(needed)} in fp32, but only {size_text(room)} are available"
    [others] = loaded.engine.totals([float(bool(why))])
    return why or ("another rank lacks the memory" if others else "")


def _narrow(model: nn.Module) -> list[torch.Tensor]:
    return [one for one in (*model.parameters(), *model.buffers()) if one.dtype in _16_BITS]


@contextmanager
def _in_fp32(loaded: LoadedModels) -> Iterator[LoadedModels]:
    """The same run in fp32: no autocast, no loss scale, any attention kernel that supports fp32, eager, no dropout."""
    kernels = partial(wide_context, loaded.engine.device)
    settings = replace(loaded.settings, forward=nullcontext, kernels=kernels)
    with exact_products(), widened(_narrow(loaded.engine.model)), eager_mode(loaded.engine.model):
        yield replace(loaded, settings=settings, state=replace(loaded.state, scale=None))
