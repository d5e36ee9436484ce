"""Before step 1, in two passes: the run as it will be, held against the plainest way to compute the same.

Packed rows and every fast path are put in together, and a part of two micro-batches goes forward and backward with all
of them, and without any, in padded rows; in 16 bits two short examples do so in fp32 before. What is compared, and
within which limits, is as in `packed_rows`, `fast_paths` and `in_fp32`, which take two passes more for each path. Which
of several is at fault this cannot tell: so it only ever says yes, and where it cannot, all is as it was and the others
look one by one.

They also look where something is drawn at random: what is dropped falls otherwise in packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.batch import Weighted
from surefoot.data.comparable import in_padded_rows
from surefoot.models.fast.packing import NAME, NO_LEAK, packed_attention, reason_of
from surefoot.models.fast.path import FastPath, Undo
from surefoot.models.modes import highest_dropout
from surefoot.planning.plan import PLAIN
from surefoot.runs.parity.differences import Differences, differences
from surefoot.runs.parity.fast_paths import (
    GO_ON,
    Settled,
    excused,
    judged,
    obstacles_of,
    of_form,
    planned_paths,
    without_blocked,
)
from surefoot.runs.parity.in_fp32 import Look, look, rounds_as_plain
from surefoot.runs.parity.passes import compared_batches, leak_of, nothing_at_zero, one_pass, short_batch
from surefoot.runs.prepared import Prepared
from surefoot.runs.setup import Setup
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.failure import is_of_the_environment


def settle_at_once(run: Prepared, setup: Setup, say: Callable[[str], None]) -> Settled | None:
    """Put in packed attention and every fast path of the plan, and leave them in, where together they compute what the
    plain model does; None where that is not seen here, and nothing is put in then. say: is told of paths that this
    model has no room for. Every rank must ask."""
    plan, engine, resumed = setup.plan, setup.engine, run.resumed
    form = plan.kernels.documents.value
    paths = [*([] if form == PLAIN else [packed_attention(form)]), *planned_paths(plan)]
    obstacles = obstacles_of(paths, engine)
    possible = [path for path in paths if path.name not in obstacles]
    if len(possible) < 2 or NAME in obstacles or setup.packing_fault or _draws(run, setup):
        return None
    step = run.timetable.next_step(setup.state.step)
    batches = compared_batches(run.stage, engine, step)
    short = short_batch(run.stage, engine, step)
    exact = look(setup, run.stage, possible, short, in_padded_rows(short, plan.tokenizer.pad_id), step)
    if exact.wrong:
        return None
    with nothing_at_zero(engine.parameters.values()):
        seen = _all_in(run, setup, possible, batches, step, exact, leaks=form != PLAIN, resumed=resumed)
    if seen is None:
        return None
    record = {**excused(judged(seen.found, plan, resumed=resumed), seen.rounds), "together": True}
    plan, found = without_blocked(plan, obstacles, say, resumed=resumed)
    together: dict[str, Any] = {path.name: of_form(path, record | exact.record(path)) for path in possible}
    if form != PLAIN:
        together[NAME] |= {"form": form, "leak": seen.leak}
    return Settled(plan, found | together)


@dataclass(frozen=True)
class _Seen:
    """found: differences to padded rows of the plain model. leak: of packed rows, see `leak_of`; 0 of others. rounds:
    what fp32 says for them where they are more than 16 bits should make."""

    found: Differences
    leak: float
    rounds: Mapping[str, Any]


def _all_in(
    run: Prepared,
    setup: Setup,
    paths: Sequence[FastPath],
    batches: Sequence[Weighted],
    step: int,
    exact: Look,
    *,
    leaks: bool,
    resumed: bool,
) -> _Seen | None:
    """The paths, put in, and what was seen; None, and the paths taken out, where that is more than rounding, or one
    fails. Where other ranks wait in the middle of a pass a failure ends the run."""
    engine, moved, fault = setup.engine, 0.0, ""
    undos: list[Undo] = []
    padded = [in_padded_rows(one, setup.plan.tokenizer.pad_id) for one in batches]
    plain = one_pass(setup, run.stage, padded, step)
    found = other = None
    try:
        undos.extend(path.install(engine.model) for path in paths)
        if leaks:
            moved, fault = leak_of(setup, batches[0].rows)
        if not fault and moved <= NO_LEAK:
            other = one_pass(setup, run.stage, batches, step)
            found = differences(engine, plain, other)
            if not judged(found, setup.plan, resumed=resumed)["outside"]:
                return _Seen(found, moved, {})
    except RuntimeError as caught:
        if is_of_the_environment(caught) or (engine.world > 1 and not resumed):
            raise
        if engine.world > 1:
            what = f"fast paths fail on this model ({reason_of(caught)}), and the run began with them"
            raise EnvironmentFault(Fault("kernels", what, GO_ON, code="SF-FAST-PATH")) from None
    for undo in reversed(undos):
        undo()
    if found is None or other is None or not all(map(exact.is_right, paths)):
        return None
    rounds = rounds_as_plain(setup, run.stage, padded, step, plain, other)
    if not rounds:
        return None
    for path in paths:
        path.install(engine.model)
    return _Seen(found, moved, rounds)


def _draws(run: Prepared, setup: Setup) -> bool:
    return run.config.optim.neftune_alpha is not None or highest_dropout(setup.engine.model) > 0
