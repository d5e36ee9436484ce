"""Compare every fast path with the reference code before step 1, on the run's own weights and examples.

Packed rows and all other paths of the plan pass through three checks:

    in fp32     Are the formulas right? All paths together and, if that differs, each alone (`in_fp32`). 16 bits could
                hide an error that fp32 shows.
    together    Does the run as configured compute what the reference code computes in padded rows? Two passes over a
                part of the next step in the run's own dtype; loss and gradients may differ by rounding
                (`differences`). For packed rows, one document is also changed, and the others must not change: this
                finds everything else in a model that mixes tokens of a row (a convolution, a recurrent state).
    alone       If they differ together, or one fails: each path alone, to find the one at fault.

Dropout masks fall differently in packed rows. In a run with randomness, packed rows are therefore compared first
without any random draws, and then the other paths on top of them, with the step's draws.

A path that differs by more than rounding is left out, and the plan records it. A resumed run keeps the paths of its
plan, as an uninterrupted run would: a path that now differs, on later weights, stays with a warning. Nothing is timed
here: the plan has decided which paths are worth using.

An engine that shards weights gathers them within the forward pass, where its ranks wait for each other and none may
fail. For such engines packed rows are tested with two short documents while the model is still whole
(`models.fast.packing.documents_fault`, called by `runs.load_models`), and so are experts, in fp32 (`parity.experts`).

`try_compiled` compares a compiled model with the eager one in the same way. If it differs by more than rounding the run
ends with an error that names the key. Times are shown so that nobody compiles in vain, but the config decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from typing import Any

from surefoot.data.batching.subsets import in_padded_rows
from surefoot.methods.method import LoadedModels
from surefoot.models.fast import FastPath, Undo
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.experts import experts_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import NAME, most_leak, packed_attention, reason_of
from surefoot.models.fast.pointwise import fused_paths
from surefoot.models.modes import eager_mode, highest_dropout, without_randomness
from surefoot.models.precision import TORCH_DTYPE
from surefoot.planning.fast_paths import EXPERTS, head_rows
from surefoot.planning.packing import without_packing
from surefoot.planning.parallel import sharder
from surefoot.planning.plan import PLAIN, Choice, RunPlan
from surefoot.runs.parity.differences import Differences, Pass, differences, limits_in
from surefoot.runs.parity.in_fp32 import check_in_fp32, key_of, rounds_as_plain
from surefoot.runs.parity.passes import compared_batches, leak_of, nonzero_matrices, one_pass, short_batch
from surefoot.runs.prepared import PreparedRun
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.failure import is_of_the_environment

STAYS = "it stays on, because the run started with it"
GO_ON = "resume with the versions and the device that the run started with, or start another run"
# Keys under `kernels:`; the key of packed rows differs.
SWITCHED = ("adapter", "loss", "last_block", "pointwise", "rotary", "gated")

# Positions whose logits the fast loss has at once where it is compared. A chunk of the run has as many as are compared
# in all, so what goes wrong between two chunks would not be seen.
_ROWS = 64

Records = dict[str, dict[str, Any]]  # path -> its record in environment.json


def planned_paths(plan: RunPlan, rows: int | None = None) -> list[FastPath]:
    """Return the fast paths of the plan in the order of installation, packed rows first.

    rows: positions whose logits the fast loss has at once; None for the run's.

    Raises EnvironmentFault if the plan's engine shards parameters: no plan is made like that, and the paths would fail
    in their first product.
    """
    engine, form = sharder(plan.parallel), plan.kernels.documents.value
    fast = [name for name in SWITCHED if getattr(plan.kernels, name).value not in (PLAIN, EXPERTS)]
    if engine and fast:
        what = f"is in the plan, but {engine} gathers the weights of a module only during its own forward pass"
        raise EnvironmentFault(
            [Fault(f"kernels.{name}", what, "start another run", code="SF-FAST-PATH") for name in fast]
        )
    packed = [] if form == PLAIN else [packed_attention(form)]
    adapter = {"fast": [adapter_path()], EXPERTS: [experts_path()]}.get(plan.kernels.adapter.value, [])
    loss = [loss_path(rows or head_rows(trains=plan.adapter is None))] if plan.kernels.loss.value == "chunked" else []
    last = [last_block_path()] if plan.kernels.last_block.value == "pruned" else []
    # After the fused ones, which skip norms with hooks, because last_block installs hooks. Before adapter: last_block
    # runs a small fp32 pass to find its layer, and the adapter path would cache fp32 products of all DoRA layers in it.
    return [*packed, *loss, *fused_paths(plan), *last, *adapter]


def check_fast_paths(run: PreparedRun, loaded: LoadedModels, say: Callable[[str], None]) -> tuple[RunPlan, Records]:
    """Install every path of the plan that computes what the reference code computes; all of them in a resumed run.
    Collective: every rank must call it.

    run: with the batches of its plan.
    loaded: models without any fast path installed.
    say: called with a sentence for each path that differs.

    Returns the plan without the rejected paths, and a record by path for environment.json: differences, limits, and
    whether the path is used.

    Raises EnvironmentFault for a path that the user named and that differs or fails and, in a resumed run, for one that
    fails.
    """
    plan, paths = loaded.plan, planned_paths(loaded.plan)
    found = {path.name: record for path in paths if (record := _settled(path, loaded))}
    left = [path for path in planned_paths(plan, _ROWS) if path.name not in found]
    if left:
        # B of a new LoRA is 0, so A has no gradient, and a path that computes it wrongly would pass.
        with nonzero_matrices(loaded.engine):
            found |= _Comparison(run, loaded, left).records(left)
    for path in paths:
        plan = _plan_after(plan, path.name, found[path.name], say, resumed=run.resumed)
    for path in paths:
        if found[path.name]["used"]:
            path.install(loaded.engine.model)
    return plan, found


def _settled(path: FastPath, loaded: LoadedModels) -> dict[str, Any]:
    """Return the record of a path that was tested before sharding or cannot be installed in this model; else empty."""
    if tested := loaded.tested.get(path.name):
        return {"form": path.form, **tested}
    why = path.obstacle(loaded.engine.model)
    return {"used": False, "obstacle": why} if why else {}


class _Comparison:
    """Passes over a part of the next step: the reference code in padded rows, and with fast paths."""

    def __init__(self, run: PreparedRun, loaded: LoadedModels, paths: Sequence[FastPath]):
        self._loaded, self._task, self._resumed = loaded, run.task, run.resumed
        self._draws = run.config.optim.neftune_alpha is not None or highest_dropout(loaded.engine.model) > 0
        self._step = run.timetable.next_step(loaded.state.step)
        pad = loaded.plan.tokenizer.pad_id
        whole = run.config.method.teacher
        self._batches = compared_batches(run.task, loaded.engine, self._step, whole=whole)
        self._rows = [in_padded_rows(batch, pad) for batch in self._batches]
        short = short_batch(run.task, loaded.engine, self._step, whole=whole)
        self._exact = check_in_fp32(loaded, run.task, paths, short, in_padded_rows(short, pad), self._step)
        self._most_leak = most_leak(TORCH_DTYPE[loaded.plan.precision.compute.value])
        self._plain: dict[bool, Pass] = {}

    def records(self, paths: list[FastPath]) -> Records:
        """Return the record of each path: from one comparison of all if they are right together, else each alone."""
        wrong = [path for path in paths if self._exact.error_of(path) is not None]
        found = {} if self._resumed else {path.name: self._record(path, used=False, outside=True) for path in wrong}
        left = [path for path in paths if path.name not in found]
        with ExitStack() as stack:
            if self._draws and _packs(left):
                packed, *left = left
                found |= self._compared([packed])
                if found[NAME]["used"]:  # the others are compared on top of it, in the run's own rows
                    stack.callback(packed.install(self._loaded.engine.model))
                    self._rows = self._batches
            return found | self._all_or_each(left, at_once=not (wrong and self._resumed))

    def _all_or_each(self, paths: list[FastPath], *, at_once: bool) -> Records:
        together: Records | None = None
        if len(paths) > 1 and at_once:
            together = self._together(paths)
            if _all_right(together):
                return together
        found: Records = {}
        for path in paths:
            found |= self._compared([path])
        good = [path for path in paths if _is_right(found[path.name])]
        if len(good) > 1:
            if together is None or good != paths:
                together = self._together(good)
            if not _all_right(together):
                found |= together
        return found

    def _together(self, paths: Sequence[FastPath]) -> Records:
        return {name: record | {"together": True} for name, record in self._compared(paths).items()}

    def _compared(self, paths: Sequence[FastPath]) -> Records:
        """Compare two passes: without the paths, and with all of them.

        A path that raises, for example where a model writes into a tensor that the path has saved, is not used. The run
        ends instead if other ranks wait in the middle of the pass, or if memory is short, where no other path would
        help.
        """
        loaded, task, engine = self._loaded, self._task, self._loaded.engine
        packs, leak, fault = _packs(paths), 0.0, ""
        rows = self._batches if packs else self._rows
        quiet = packs and self._draws
        undos: list[Undo] = []
        with without_randomness(engine.model) if quiet else nullcontext():
            if quiet not in self._plain:
                self._plain[quiet] = one_pass(loaded, task, self._rows, self._step)
            plain = self._plain[quiet]
            try:
                undos.extend(path.install(engine.model) for path in paths)
                if packs:
                    leak, fault = leak_of(loaded, self._batches[0].rows)
                other = None if fault else one_pass(loaded, task, rows, self._step)
            except RuntimeError as caught:
                if is_of_the_environment(caught) or (engine.world > 1 and not self._resumed):
                    raise
                other, fault = None, reason_of(caught)
                if engine.world > 1:
                    keys = [key_of(path.name) for path in paths]
                    what = f"{', '.join(keys)} fail on this model ({fault}), but the run started with them"
                    raise EnvironmentFault(Fault("kernels", what, GO_ON, code="SF-FAST-PATH")) from None
            finally:
                for undo in reversed(undos):
                    undo()
            if other is None:
                return {path.name: self._record(path, used=False, fault=fault) for path in paths}
            seen = judged(differences(engine, plain, other), loaded.plan, resumed=self._resumed)
            leaks = not leak <= self._most_leak  # also true for NaN
            if leaks or any(self._exact.error_of(path) is not None for path in paths):
                seen |= {"used": self._resumed, "outside": True}
            elif seen["outside"] and all(map(self._exact.is_right, paths)):
                rounds = rounds_as_plain(loaded, task, self._rows, self._step, plain, other)
                seen |= {"used": True, "outside": False, **rounds} if rounds else {}
        return {path.name: self._record(path, **seen, **self._leak(path, leak)) for path in paths}

    def _leak(self, path: FastPath, leak: float) -> dict[str, float]:
        return {"leak": leak, "leak_limit": self._most_leak} if path.name == NAME else {}

    def _record(self, path: FastPath, **seen: Any) -> dict[str, Any]:
        return seen | self._exact.record(path) | ({"form": path.form} if path.form else {})


def _packs(paths: Sequence[FastPath]) -> bool:
    return any(path.name == NAME for path in paths)


def _is_right(record: Mapping[str, Any]) -> bool:
    """Whether the path was compared and is within its limits."""
    return record.get("outside") is False


def _all_right(records: Records) -> bool:
    return all(map(_is_right, records.values()))


def judged(seen: Differences, plan: RunPlan, *, resumed: bool) -> dict[str, Any]:
    """Return the record of a comparison."""
    limits = limits_in(plan.precision.compute.value)
    outside = bool(seen.beyond(limits))
    return {"used": resumed or not outside, "outside": outside, "differs": asdict(seen), "limits": asdict(limits)}


def describe_difference(record: Mapping[str, Any], plain: str = "the plain path") -> str:
    """Describe a record that is not within its limits. plain: what it was compared with."""
    others = "together with others " if record.get("together") else ""
    if "fault" in record:
        return f"{others}fails on this model ({record['fault']})"
    if not record.get("leak", 0.0) <= record.get("leak_limit", 0.0):
        moves = f"lets one document change another by {record['leak']:.2g} of its own change, on this model"
        return f"{others}{moves}; allowed is {record['leak_limit']:.2g}"
    exact = record.get("fp32", {})
    if exact and not exact.get("differs", 0.0) <= exact.get("limit", 0.0):
        return f"differs from {plain} by {exact['differs']:.2g} in fp32 on this model; allowed is {exact['limit']:.4g}"
    seen, limits = Differences(**record["differs"]), Differences(**record["limits"])
    return f"{others}differs from {plain} by {seen.beyond(limits)}"


def _plan_after(
    plan: RunPlan, name: str, record: Mapping[str, Any], say: Callable[[str], None], *, resumed: bool
) -> RunPlan:
    """Return the plan after a comparison: unchanged, or with the reference code instead of this path.

    Raises EnvironmentFault if the path is not used although the user named it, or the run started with it.
    """
    if record["used"] and not record["outside"]:
        return plan
    key, choice, packs = key_of(name), getattr(plan.kernels, name), name == NAME
    plain = "padded rows" if packs else "the plain path"
    what = f"cannot be used: {record['obstacle']}" if "obstacle" in record else describe_difference(record, plain)
    what = f"{choice.value} {what}"
    if record["used"]:
        say(f"{key}: {what}; {STAYS}")
        return plan
    if resumed:
        raise EnvironmentFault(Fault(key, f"{what}, but the run started with it", GO_ON, code="SF-FAST-PATH"))
    if choice.source == "user":
        fix = f"set {key}: auto or off" if packs else f"set {key}: auto or plain, and please report it"
        raise EnvironmentFault(Fault(key, what, fix, code="SF-FAST-PATH"))
    say(f"{key}: {what}; {'rows are padded' if packs else 'the plain path is used'}")
    if packs:
        return without_packing(plan, what, "measured")
    return replace(plan, kernels=replace(plan.kernels, **{name: Choice(PLAIN, what, "measured")}))


_OFF = "set compile: off"


def try_compiled(
    run: PreparedRun, loaded: LoadedModels, say: Callable[[str], None], warn: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the compiled model with the eager one. Collective: every rank must call it.

    say, warn: print a line.

    Returns the record: differences, limits, seconds of both and of compilation.
    Raises EnvironmentFault if compilation fails, or if the compiled model of a new run computes something else.
    """
    plan, engine = loaded.plan, loaded.engine
    step = run.timetable.next_step(loaded.state.step)
    batches = compared_batches(run.task, engine, step, whole=run.config.method.teacher)

    def timed() -> tuple[Pass, float]:
        started = time.perf_counter()
        found = one_pass(loaded, run.task, batches, step)
        return found, time.perf_counter() - started

    with without_randomness(engine.model), nonzero_matrices(engine):
        with eager_mode(engine.model):
            timed()  # the first pass includes one-time set-up of matmul kernels
            eager, eager_seconds = timed()
        try:
            first_seconds = timed()[1]
            compiled, seconds = timed()
        except RuntimeError as fault:
            if is_of_the_environment(fault):
                raise
            what = f"{plan.compile.value} fails on this model: {reason_of(fault)}"
            raise EnvironmentFault(Fault("compile", what, _OFF, code="SF-FAST-PATH")) from None
    record = judged(differences(engine, eager, compiled), plan, resumed=run.resumed)
    if record["outside"]:
        what = f"{plan.compile.value} {describe_difference(record, 'the model as it is written')}"
        if not run.resumed:
            raise EnvironmentFault(Fault("compile", what, f"{_OFF}, and please report it", code="SF-FAST-PATH"))
        warn(f"compile: {what}; {STAYS}")
    gain, compiling = eager_seconds / seconds, max(first_seconds - seconds, 0.0)
    line = f"compile: {plan.compile.value} took {compiling:.0f} s to compile and makes a pass {gain:.2f} times as fast"
    if gain > 1:
        say(line)
    else:
        warn(f"{line}; {_OFF} in another run")
    return record | {"compiling": compiling, "seconds": seconds, "eager_seconds": eager_seconds}
