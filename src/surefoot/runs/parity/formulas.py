"""Every fast path of a run in fp32, against the plain way in fp32, on the same weights and examples.

In 16 bits what a path rounds hides what it computes wrongly: a scale that is off by a fiftieth is well within the
limit. In fp32 two orders of the same sums agree to some parts in a million, so that a wrong formula shows whatever the
run's precision is. All paths go together; where that differs or fails, each goes alone, to find out which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.data.batch import Weighted
from surefoot.methods.method import Stage
from surefoot.models.fast.packing import NAME, reason_of
from surefoot.models.fast.path import FastPath, Undo
from surefoot.models.modes import without_randomness
from surefoot.runs.parity.differences import LIMITS, largest_difference
from surefoot.runs.parity.passes import nothing_at_zero, one_pass
from surefoot.runs.setup import Setup
from surefoot.system.errors import EnvironmentFault
from surefoot.training.failure import is_of_the_environment

LIMIT = LIMITS["fp32"]
ATTENTION = "attention"
_KEYS = {NAME: "data.packing", ATTENTION: "attention"}  # in the config; others are under `kernels:`


@dataclass(frozen=True)
class Formulas:
    """compared: the keys of the config whose paths were looked at. error: the largest difference, of all together or
    of the one that differs most. wrong: key -> by how much it differs, alone. unseen: key -> why it cannot go in fp32,
    as where a kernel knows 16 bits only."""

    compared: tuple[str, ...]
    error: float
    wrong: dict[str, float]
    unseen: dict[str, str]


def compare_formulas(
    setup: Setup,
    stage: Stage,
    paths: Sequence[FastPath],
    rows: Sequence[Weighted],
    padded: Sequence[Weighted],
    step: int,
) -> Formulas:
    """setup: of a model in fp32 that has none of the paths, and is left so. rows: micro-batches as the run lays them
    out. padded: the same examples in padded rows."""
    engine = setup.engine

    def differ(some: Sequence[FastPath]) -> float | str:
        """By how much, or why it fails."""
        batches = rows if any(path.name == NAME for path in some) else padded
        undos: list[Undo] = []
        try:
            undos.extend(path.install(engine.model) for path in some)
            return largest_difference(engine, plain, one_pass(setup, stage, batches, step))
        except (EnvironmentFault, RuntimeError) as caught:
            if is_of_the_environment(caught) or engine.world > 1:  # other ranks wait in the middle of the pass
                raise
            return reason_of(caught)
        finally:
            for undo in reversed(undos):
                undo()

    with without_randomness(engine.model), nothing_at_zero(engine.parameters.values()):
        plain = one_pass(setup, stage, padded, step)
        together = differ(paths)
        if isinstance(together, float) and together <= LIMIT:
            return Formulas(tuple(key_of(path) for path in paths), together, {}, {})
        alone = {key_of(path): differ([path]) for path in paths}
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


def key_of(path: FastPath) -> str:
    return _KEYS.get(path.name, f"kernels.{path.name}")
