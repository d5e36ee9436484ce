"""Compare every fast path with the plain code before step 1, on the run's own weights and examples.

`settle_at_once` puts packed rows and all paths in together and compares two passes: the run as it will be, and the
plain code in padded rows. It only ever says yes. Where the two differ, a path fails, or random numbers are drawn (masks
of dropout fall otherwise in packed rows), it takes everything out again, and `packed_rows.settle_packing` and `settle`
compare path by path, two passes each, to find out which is at fault.

Loss and gradients may differ by rounding, for which `differences` has limits; `in_fp32` checks the formulas where 16
bits could hide a fault. A path that differs by more is taken out, and the plan says so. A resumed run keeps what its
plan says, as it would have had it never stopped: its paths are compared once more, on other weights and examples, and
one that now differs stays, with a caution. Nothing is timed: whether a path is worth it was decided by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.subsets import in_padded_rows
from surefoot.methods.method import Setup, Stage
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import NAME, NO_LEAK, packed_attention, reason_of
from surefoot.models.fast.path import FastPath, Undo
from surefoot.models.fast.pointwise import pointwise_path
from surefoot.models.modes import highest_dropout
from surefoot.planning.fast_paths import CUTTING, head_rows
from surefoot.planning.plan import PLAIN, Choice, RunPlan
from surefoot.runs.parity.differences import Differences, Pass, differences, limits_in
from surefoot.runs.parity.in_fp32 import Fp32Check, check_in_fp32, rounds_as_plain
from surefoot.runs.parity.passes import compared_batches, leak_of, nonzero_matrices, one_pass, short_batch
from surefoot.runs.prepared import Prepared
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.engine import Engine
from surefoot.training.failure import is_of_the_environment

STAYS = "it stays, as the run began with it"
GO_ON = "resume with the versions and the device that the run began with, or start another run"
SWITCHED = ("adapter", "loss", "last_block", "pointwise")  # the paths of this module, by their keys under `kernels:`


@dataclass(frozen=True)
class Settled:
    """The outcome of comparing fast paths.

    plan: with the paths that were taken out.
    found: path -> differences, limits and whether it stays, for environment.json.
    """

    plan: RunPlan
    found: dict[str, Any]


def planned_paths(plan: RunPlan) -> list[FastPath]:
    """Those that the plan has, in the order in which they are put in.

    Raises EnvironmentFault where the plan's engine cuts parameters: no plan is made so, and they would fail in the
    first product.
    """
    engine = plan.parallel.engine.value
    if engine in CUTTING and (named := [name for name in SWITCHED if getattr(plan.kernels, name).value != PLAIN]):
        what = f"the plan has it, and {engine} hands each module its weights only while the module's own forward runs"
        raise EnvironmentFault(
            [Fault(f"kernels.{name}", what, "start another run", code="SF-FAST-PATH") for name in named]
        )
    adapter = [adapter_path()] if plan.kernels.adapter.value == "fast" else []
    loss = [loss_path(head_rows(trains=plan.adapter is None))] if plan.kernels.loss.value == "chunked" else []
    last = [last_block_path()] if plan.kernels.last_block.value == "pruned" else []
    pointwise = [pointwise_path(plan.device.value)] if plan.kernels.pointwise.value == "fused" else []
    return [*adapter, *loss, *pointwise, *last]  # the last one has hooks, and norms with hooks are left alone


def settle(
    plan: RunPlan,
    setup: Setup,
    stage: Stage,
    paths: Sequence[FastPath],
    *,
    last: int,
    resumed: bool,
    say: Callable[[str], None],
) -> Settled:
    """Put in every path that computes what the plain one does, and leave it in; all of them where `resumed`.

    last: the last step of the run.
    say: is told of each that does not.
    Every rank must ask.

    Raises EnvironmentFault for one that was asked for by name and does not, and, where `resumed`, for one that fails.
    """
    engine = setup.engine
    obstacles = obstacles_of(paths, engine)
    plan, found = without_blocked(plan, obstacles, say, resumed=resumed)
    possible = [path for path in paths if path.name not in obstacles]
    if not possible:
        return Settled(plan, found)
    step = min(setup.state.step + 1, last)
    batches = compared_batches(stage, engine, step)

    def run() -> Pass:
        return one_pass(setup, stage, batches, step)

    def rounds(plain: Pass, other: Pass) -> dict[str, Any]:
        return rounds_as_plain(setup, stage, batches, step, plain, other)

    short = short_batch(stage, engine, step)
    seen = check_in_fp32(setup, stage, possible, short, short, step)
    with nonzero_matrices(engine.parameters.values()):
        plain = run()
        good: list[FastPath] = []
        for path in possible:
            record = _compared(setup, path, plain, run, seen, rounds, resumed=resumed)
            record = found[path.name] = of_form(path, record)
            plan = _weighed(plan, path.name, record, describe_difference(record), say, resumed=resumed)
            if record["used"]:
                good.append(path)
        installed = [path.install(engine.model) for path in good]
        all_within = not any(found[path.name]["outside"] for path in good)
        if len(good) > 1 and all_within:
            other = run()
            together = judged(differences(engine, plain, other), plan, resumed=resumed)
            if together["outside"]:
                _take_out(installed)
                right = all(map(seen.is_right, good))
                together = excused(together, rounds(plain, other) if right else {})
                if together["used"]:
                    installed = [path.install(engine.model) for path in good]
            for path in good if together["outside"] else ():
                record = found[path.name] = of_form(path, together)
                what = f"together with others {describe_difference(record)}"
                plan = _weighed(plan, path.name, record, what, say, resumed=resumed)
    return Settled(plan, found)


def obstacles_of(paths: Sequence[FastPath], engine: Engine) -> dict[str, str]:
    """Of those that cannot be put into this model why."""
    return {path.name: why for path in paths if (why := path.obstacle(engine.model))}


def without_blocked(
    plan: RunPlan, obstacles: Mapping[str, str], say: Callable[[str], None], *, resumed: bool
) -> tuple[RunPlan, dict[str, Any]]:
    """The plan with plain paths in place of those, and what is recorded of them. Raises as `settle` does."""
    for name, why in obstacles.items():
        plan = _without(plan, name, f"cannot be used: {why}", say, resumed=resumed)
    return plan, {name: {"used": False, "obstacle": why} for name, why in obstacles.items()}


def _compared(
    setup: Setup,
    path: FastPath,
    plain: Pass,
    run: Callable[[], Pass],
    seen: Fp32Check,
    rounds: Callable[[Pass, Pass], dict[str, Any]],
    *,
    resumed: bool,
) -> dict[str, Any]:
    """What is recorded of a path.

    One that fails, as where a model writes into what the path keeps, is not used; where other ranks wait it cannot be
    taken out, and neither does another path help against too little memory.

    seen: what fp32 showed of it.
    """
    engine, wrong = setup.engine, seen.error_of(path) is not None
    if wrong and not resumed:
        return {"used": False, "outside": True, **seen.record(path)}
    undo = path.install(engine.model)
    try:
        other = run()
    except RuntimeError as fault:
        if is_of_the_environment(fault) or (engine.world > 1 and not resumed):
            raise
        return {"used": False, "fault": next(iter(str(fault).splitlines()), "")}
    finally:
        undo()
    record = judged(differences(engine, plain, other), setup.plan, resumed=resumed) | seen.record(path)
    if record["outside"] and seen.is_right(path):
        record = excused(record, rounds(plain, other))
    return record | {"outside": record["outside"] or wrong}


def judged(seen: Differences, plan: RunPlan, *, resumed: bool) -> dict[str, Any]:
    """The record of a path that was compared."""
    limits = limits_in(plan.precision.compute.value)
    outside = bool(seen.beyond(limits))
    return {"used": resumed or not outside, "outside": outside, "differs": asdict(seen), "limits": asdict(limits)}


def excused(record: dict[str, Any], rounds: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a path that is outside its limits, with what fp32 says for it; the same where that is nothing."""
    return record | {"used": True, "outside": False, **rounds} if rounds else record


def of_form(path: FastPath, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the form of the path, where it has several."""
    return record | ({"form": path.form} if path.form else {})


def _without(plan: RunPlan, name: str, what: str, say: Callable[[str], None], *, resumed: bool) -> RunPlan:
    """The plan with the plain path in place of this one. Raises EnvironmentFault where the user named it, or the run
    began with it."""
    choice: Choice[str] = getattr(plan.kernels, name)
    if resumed:
        raise EnvironmentFault(
            Fault(f"kernels.{name}", f"{choice.value} {what}, and the run began with it", GO_ON, code="SF-FAST-PATH")
        )
    if choice.source == "user":
        raise EnvironmentFault(
            Fault(
                f"kernels.{name}", what, f"set kernels.{name}: auto or plain, and please report it", code="SF-FAST-PATH"
            )
        )
    say(f"kernels.{name}: {choice.value} {what}; the plain path is used")
    plain = Choice(PLAIN, f"{choice.value} {what}", "measured")
    return replace(plan, kernels=replace(plan.kernels, **{name: plain}))


def _weighed(
    plan: RunPlan, name: str, record: Mapping[str, Any], what: str, say: Callable[[str], None], *, resumed: bool
) -> RunPlan:
    """The plan after a comparison.

    what: of a path that is not used, or stays although it is outside its limit.
    """
    if not record["used"]:
        return _without(plan, name, what, say, resumed=resumed)
    if record["outside"]:
        say(f"kernels.{name}: {getattr(plan.kernels, name).value} {what}; {STAYS}")
    return plan


def describe_difference(record: Mapping[str, Any], plain: str = "the plain path") -> str:
    """Of a record of a path that was compared, as if it were not within its limits."""
    if "fault" in record:
        return f"fails on this model ({record['fault']})"
    exact = record.get("fp32", {})
    if exact and not exact.get("differs", 0.0) <= exact.get("limit", 0.0):
        return f"differs from {plain} by {exact['differs']:.2g} in fp32 on this model; allowed is {exact['limit']:.4g}"
    seen, limits = Differences(**record["differs"]), Differences(**record["limits"])
    return f"differs from {plain} by {seen.beyond(limits)}"


def _take_out(installed: Sequence[Undo]) -> None:
    for undo in reversed(installed):
        undo()


def settle_at_once(run: Prepared, setup: Setup, say: Callable[[str], None]) -> Settled | None:
    """Put in packed attention and every fast path of the plan, and leave them in, where together they compute what the
    plain model does; None where that is not seen here, and nothing is put in then.

    say: is told of paths that this model has no room for.
    Every rank must ask.
    """
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
    exact = check_in_fp32(setup, run.stage, possible, short, in_padded_rows(short, plan.tokenizer.pad_id), step)
    if exact.wrong:
        return None
    with nonzero_matrices(engine.parameters.values()):
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
    exact: Fp32Check,
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
