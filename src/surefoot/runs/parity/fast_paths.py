"""Every fast path is held against the plain one before step 1, on the run's own weights and examples.

Two micro-batches of the step that comes next go forward and backward without the path and with it. An adapter's B is 0
before its first step, and whatever is multiplied by 0 agrees: so parameters that are 0 are given small numbers for as
long as this takes. Loss and gradients may differ by rounding, for which `differences` has limits. A path that
differs by more is taken out again, and the plan says so. A resumed run stays with what its plan says, as it would have
had it never stopped: its paths are held against the plain one once more, on other weights and examples, and one that
differs stays and is told. Nothing is timed.

A path's gain is the business of whoever planned it; here it only has to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.methods.method import Stage
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.path import FastPath, Undo
from surefoot.models.fast.pointwise import pointwise_path
from surefoot.planning.fast_paths import CUTTING, head_rows
from surefoot.planning.plan import PLAIN, Choice, RunPlan
from surefoot.runs.parity.differences import Differences, Pass, differences, limits_in
from surefoot.runs.parity.in_fp32 import Look, look, rounds_as_plain
from surefoot.runs.parity.passes import compared_batches, nothing_at_zero, one_pass, short_batch
from surefoot.runs.setup import Setup
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.engine import Engine
from surefoot.training.failure import is_of_the_environment

STAYS = "it stays, as the run began with it"
GO_ON = "resume with the versions and the device that the run began with, or start another run"
SWITCHED = ("adapter", "loss", "last_block", "pointwise")  # the paths of this module, by their keys under `kernels:`


@dataclass(frozen=True)
class Settled:
    """plan: with the paths that were taken out. found: path -> differences, limits and whether it stays, for
    environment.json."""

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
    """Put in every path that computes what the plain one does, and leave it in; all of them where `resumed`. last: the
    last step of the run. say: is told of each that does not. Every rank must ask.

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
    seen = look(setup, stage, possible, short, short, step)
    with nothing_at_zero(engine.parameters.values()):
        plain = run()
        good: list[FastPath] = []
        for path in possible:
            record = _compared(setup, path, plain, run, seen, rounds, resumed=resumed)
            record = found[path.name] = of_form(path, record)
            plan = _weighed(plan, path.name, record, said_of(record), say, resumed=resumed)
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
                what = f"together with others {said_of(record)}"
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
    seen: Look,
    rounds: Callable[[Pass, Pass], dict[str, Any]],
    *,
    resumed: bool,
) -> dict[str, Any]:
    """What is recorded of a path. One that fails, as where a model writes into what the path keeps, is not used; where
    other ranks wait it cannot be taken out, and neither does another path help against too little memory. seen: what
    fp32 showed of it."""
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
    """The plan after a comparison. what: of a path that is not used, or stays although it is outside its limit."""
    if not record["used"]:
        return _without(plan, name, what, say, resumed=resumed)
    if record["outside"]:
        say(f"kernels.{name}: {getattr(plan.kernels, name).value} {what}; {STAYS}")
    return plan


def said_of(record: Mapping[str, Any], plain: str = "the plain path") -> str:
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
