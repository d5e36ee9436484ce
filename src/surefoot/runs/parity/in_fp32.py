"""The fast paths of a run compared with the plain code in fp32, where rounding cannot hide a wrong formula.

In 16 bits honest rounding is as large as a small fault: a scale that is off by a fiftieth is well within the limit. In
fp32 two orders of the same sums agree to some parts in a million. The model at hand can run in fp32 for a moment: what
trains is in fp32 anyway, and widening what is frozen is exact. Two questions are answered:

    formulas    every path against the plain code, both in fp32, on two short examples and a decoder of few layers: of
                each kind of layer the first, and the last of all. A path does the same in every layer of a kind. All
                paths run together; where that differs or fails, each runs alone, to find out which. 1e-3 is allowed,
                as doctor allows it. Checked whenever it can run.
    rounding    where two ways differ by more than 16 bits should: each against the plain code in fp32, on the whole
                model and the same examples. A path about as far from fp32 as the plain code is rounds as that does, and
                is right. Checked only where the answer decides something.

Afterwards the very same tensors are back and no random number was drawn, so the run is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import Weighted
from surefoot.methods.method import LoadedModels, Task
from surefoot.models.decoder import few_layers
from surefoot.models.fast import FastPath, Undo
from surefoot.models.fast.packing import NAME, reason_of
from surefoot.models.modes import eager_mode, without_randomness
from surefoot.models.precision import exact_products, widened
from surefoot.planning.fast_paths import CUTTING
from surefoot.planning.memory import usable
from surefoot.planning.plan import RunPlan
from surefoot.runs.parity.differences import LIMITS, Differences, Pass, differences, largest_difference, limits_in
from surefoot.runs.parity.passes import nonzero_matrices, one_pass
from surefoot.system.errors import EnvironmentFault
from surefoot.system.messages import size_text
from surefoot.training.failure import is_of_the_environment

LIMIT = LIMITS["fp32"]
ATTENTION = "attention"
_KEYS = {NAME: "data.packing", ATTENTION: "attention"}  # in the config; others are under `kernels:`


@dataclass(frozen=True)
class Formulas:
    """The outcome of comparing formulas in fp32.

    compared: the keys of the config whose paths were looked at.
    error: the largest difference, of all together or of the one that differs most.
    wrong: key -> by how much it differs, alone.
    unseen: key -> why it cannot go in fp32, as where a kernel knows 16 bits only.
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
    """Compare paths with the plain code in fp32, together and, where that differs, one by one.

    loaded: of a model in fp32 that has none of the paths, and is left so.
    rows: micro-batches as the run lays them out.
    padded: the same examples in padded rows.
    """
    engine = loaded.engine

    def differ(some: Sequence[FastPath]) -> float | str:
        """By how much, or why it fails."""
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

    with without_randomness(engine.model), nonzero_matrices(engine.parameters.values()):
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
    """The key of the config that switches a path."""
    return _KEYS.get(name, f"kernels.{name}")


# How many times as far from fp32 as the plain way a path may be. Two ways that round independently of each other are
# equally far but for chance, which in the kind of parameters that differs most makes up to 2.9 of it. A length may be
# as far as the plain way's gradient is: its own distance may be 0 by chance. Measured: docs/evidence/fast-paths.md.
_DISTANCE_LIMIT = 4.0
_LOST = 1.0  # of a distance: there nothing of the gradient is left, and nothing can be held to it
_16_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp32Check:
    """What the check in fp32 found, if it could run.

    found: of the paths that were looked at in fp32.
    why: there is nothing of that; empty also in a run in fp32, in which the comparison itself says it all.
    """

    found: Formulas | None = None
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.found is not None and bool(self.found.wrong)

    def is_right(self, path: FastPath) -> bool:
        """Seen in fp32, and not wrong."""
        return self.found is not None and key_of(path.name) in self.found.compared and self.error_of(path) is None

    def error_of(self, path: FastPath) -> float | None:
        """By how much a path differs that is wrong, alone or together with others."""
        wrong: Mapping[str, float] = {} if self.found is None else self.found.wrong
        return next((error for keys, error in wrong.items() if key_of(path.name) in keys.split(" with ")), None)

    def record(self, path: FastPath) -> dict[str, Any]:
        """For environment.json."""
        if self.found is None:
            return {"fp32": {"unseen": self.why}} if self.why else {}
        if key_of(path.name) not in self.found.compared:
            return {"fp32": {"unseen": self.found.unseen.get(key_of(path.name), "it goes in 16 bits only")}}
        error = self.error_of(path)
        return {"fp32": {"differs": self.found.error if error is None else error, "limit": LIMIT}}


def check_in_fp32(
    loaded: LoadedModels, task: Task, paths: Sequence[FastPath], rows: Weighted, padded: Weighted, step: int
) -> Fp32Check:
    """Compare the formulas of paths that are not in the model yet. Every rank must call it.

    paths: a packed attention that computes in 16 bits alone is left out.
    rows: short examples as the run lays them out.
    padded: the same examples in padded rows.
    step: whose random numbers are drawn.
    """
    if loaded.plan.precision.compute.value == "fp32":
        return Fp32Check()
    paths = [path for path in paths if path.name != NAME or _goes_in_fp32(loaded)]
    if not paths:
        return Fp32Check(why="it goes in 16 bits only")
    if why := _unsuited(loaded.plan):
        return Fp32Check(why=why)
    with few_layers(loaded.engine.model):
        why = _no_room(loaded)
        if not why and not loaded.engine.totals([float(rows.weight)])[0]:
            why = "the shortest examples have nothing to learn from"
        if why:
            return Fp32Check(why=why)
        try:
            with _in_fp32(loaded) as exact:
                return Fp32Check(compare_formulas(exact, task, paths, [rows], [padded], step))
        except Exception as caught:  # a model with fewer layers than its config has may fail in any way
            if loaded.engine.world > 1 or (isinstance(caught, RuntimeError) and is_of_the_environment(caught)):
                raise
            said = reason_of(caught) if isinstance(caught, EnvironmentFault | RuntimeError) else repr(caught)
            return Fp32Check(why=f"a part of its decoder does not go in fp32 ({said})")


def rounds_as_plain(
    loaded: LoadedModels, task: Task, batches: Sequence[Weighted], step: int, plain: Pass, other: Pass
) -> dict[str, Any]:
    """What is recorded of a pass that differs from the plain one by more than rounding should, where it is no further
    from fp32 than that one; empty where it is, or that cannot be seen. The model must be as `plain` was computed, on
    these batches. Every rank must ask."""
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


def _goes_in_fp32(loaded: LoadedModels) -> bool:
    return loaded.plan.kernels.documents.value != "varlen"


def _unsuited(plan: RunPlan) -> str:
    """Why no part of the model can be computed in fp32, as far as the plan tells."""
    if plan.parallel.engine.value in CUTTING:
        return f"{plan.parallel.engine.value} has shared the weights out"
    packed = plan.precision.packed
    return f"a base in {packed} is unpacked to 16 bits" if packed else ""


def _no_room(loaded: LoadedModels) -> str:
    """Why the model as it is cannot be widened, the same on all ranks."""
    memory, why = loaded.plan.memory, ""
    needed = sum(4 * one.numel() for one in _narrow(loaded.engine.model))
    held = memory.weights + memory.gradients + memory.beside
    room = max(usable(memory.available) - held, 0) // 2  # the other half is for the pass
    if needed > room:
        why = f"its weights take {size_text(needed)} in fp32, and there is room for {size_text(room)}"
    [others] = loaded.engine.totals([float(bool(why))])
    return why or ("another rank has no room for it" if others else "")


def _narrow(model: nn.Module) -> list[torch.Tensor]:
    return [one for one in (*model.parameters(), *model.buffers()) if one.dtype in _16_BITS]


@contextmanager
def _in_fp32(loaded: LoadedModels) -> Iterator[LoadedModels]:
    """The same run without autocast, without a loss scale, by whatever attention kernel knows fp32, as it is written
    and with nothing dropped."""
    settings = replace(loaded.settings, forward=nullcontext, kernels=nullcontext)
    with exact_products(), widened(_narrow(loaded.engine.model)), eager_mode(loaded.engine.model):
        yield replace(loaded, settings=settings, state=replace(loaded.state, scale=None))
