"""Does `surefoot tune` find what a full grid finds, and in how much of its time?

    python benchmarks/tune_grid.py [--keys precision.compute data.packing …] [--clock cpu] [--json FILE]

For two sizes of a random Llama on short instructions: first the search, then every combination of the same values with
trials of the same length, then the search's best and the grid's best again in turns, which decides. Keys that are not
named stay as the plan has them. Both take their trials as copies of one process that has the libraries; combinations
that the planner refuses cost the grid nothing.

It wants an idle machine. Where there is none, `--clock cpu` with OMP_NUM_THREADS=1 counts processor time instead of the
wall clock's, in trials and in what search and grid cost.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from bases import Shape, build_base
from peers import machine
from surefoot.commands.tune.attempt import Request, can_fork, workshop
from surefoot.commands.tune.run import search_settings
from surefoot.commands.tune.search import Space, given_keys, make_space
from surefoot.commands.tune.trials import ROUNDS, with_settings
from surefoot.config.load import check_config, load_config
from surefoot.planning.measurements import LengthFacts, measurements_from_json
from surefoot.planning.plan import RunPlan, diff_plans
from surefoot.report.observer import silent_console
from surefoot.runs.custom import NOTHING
from surefoot.runs.make_plan import make_plan
from surefoot.runs.plan_with_data import lengths_of
from surefoot.runs.prepare import prepare
from surefoot.runs.run_folder import FolderState
from surefoot.system import hardware
from surefoot.system.errors import InputError

SIZES = {"2 layers, 256 wide": Shape(2, 256), "4 layers, 384 wide": Shape(4, 384)}
# Compiling costs a minute each time, hours in a grid; checkpointing is the same setting twice where everything fits.
_KEYS = ("data.packing", "attention.implementation", "batch.micro", "data.workers")
_HELD = {"compile": "off", "data.workers": 0, "gradient_checkpointing": "off"}  # what stays unless it is named
_TURNS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--keys", nargs="+", metavar="KEY", default=list(_KEYS), help="Keys to vary.")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.5, help="Of the timed steps of a trial, about.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    print(f"{machine()['date']}, {machine()['name']}, {machine()['cores']} cores, {asked.clock} clock", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        found = {size: compare(size, Path(temporary), asked) for size in asked.sizes}
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "sizes": found}, indent=1, default=str) + "\n")


def compare(size: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    given = _given(size, folder, asked)
    spent = _spent if asked.clock == "cpu" else time.perf_counter
    started = spent()
    tuned = search_settings(
        given, seconds=asked.seconds, on_trial=lambda one: None, say=lambda words: None, clock=asked.clock
    )
    searching = spent() - started
    print(f"\n{size}: tune looked at {len(tuned.tried)} settings in {searching:.0f} s; now the grid", flush=True)
    started = spent()
    rates = _grid(given, tuned.steps, asked.clock)
    gridding = spent() - started
    best = max(rates, key=lambda one: one[0])
    own, other = _in_turns([tuned.config, with_settings(given, best[1])], tuned.steps, asked.clock)
    changed = dict(tuned.best.settings)
    taken = sum(1 for one in rates if one[0])
    early = sum(one.early for one in tuned.tried)
    print(
        f"{size}: {taken} of {len(rates)} combinations ran, {gridding:.0f} s; tune looked at {len(tuned.tried)} "
        f"settings, gave up {early} early, {searching:.0f} s: {searching / gridding:.0%}\n"
        f"  tune's best  {own:>8,.0f} tok/s  {changed}\n  grid's best  {other:>8,.0f} tok/s  {best[1]}\n"
        f"  tune's best is at {own / other:.1%} of the grid's",
        flush=True,
    )
    return {
        "searching": searching,
        "gridding": gridding,
        "steps": tuned.steps,
        "tried": [vars(one) for one in tuned.tried],
        "combinations": rates,
        "tune": [own, changed],
        "grid": [other, best[1]],
    }


def _combinations(space: Space) -> list[dict[str, Any]]:
    """Every combination of the axes' values."""
    names = [axis.key for axis in space.axes]
    return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in space.axes))]


def _grid(given: dict[str, Any], steps: int, clock: Any) -> list[tuple[float, Any, str]]:
    """(tokens a second or 0, settings, why not) of every combination that plans another run than those before."""
    found, seen = [], []
    plan, lengths = _planned(given)
    with workshop(forks=can_fork(hardware.detect().kind)) as shop:
        for settings in _combinations(_space(given)):
            config = with_settings(given, settings)
            try:
                made = make_plan(check_config(config), measurements=plan.measurements, lengths=lengths)
            except InputError as error:
                found.append((0.0, settings, str(error.faults[0])))
                continue
            beside = settings.get("data.workers")
            if any(beside == with_it and not diff_plans(made, other) for other, with_it in seen):
                continue
            seen.append((made, beside))
            answer = shop.attempt(Request(config, steps, ROUNDS, clock=clock))
            found.append((answer.trial.rate if answer.trial else 0.0, settings, answer.failure))
    return found


def _in_turns(configs: list[dict[str, Any]], steps: int, clock: Any) -> list[float]:
    """The best rate of each."""
    with workshop(forks=can_fork(hardware.detect().kind)) as shop:

        def rate(config: dict[str, Any]) -> float:
            answer = shop.attempt(Request(config, steps, ROUNDS, clock=clock))
            return answer.trial.rate if answer.trial else 0.0

        rates = [[rate(config) for config in configs] for _ in range(_TURNS)]
    return [max(turn[side] for turn in rates) for side in range(len(configs))]


def _planned(given: dict[str, Any]) -> tuple[RunPlan, LengthFacts]:
    """As `tune` plans: with the lengths of the data."""
    with tempfile.TemporaryDirectory() as folder, silent_console() as console:
        config = check_config({**given, "output": f"{folder}/run"})
        run = prepare(config, FolderState(Path(folder) / "run", "new"), console, NOTHING)
        return run.plan, lengths_of(run.config, run.task.data)


def _space(given: dict[str, Any]) -> Space:
    plan, _ = _planned(given)
    seen = measurements_from_json(plan.measurements)
    return make_space(check_config(given), set(given_keys(given)), plan, hardware.detect(), seen)


def _given(size: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """A config as plain values that holds what is not to be varied."""
    base = folder / size.replace(" ", "-").replace(",", "")
    texts = [" ".join(record.values()) for record in json.loads(asked.data.read_text(encoding="utf-8"))]
    build_base(base, texts, SIZES[size])
    path = folder / f"{base.name}.yaml"
    path.write_text(
        f"stage: sft\nmodel: {base}\noutput: {folder / 'run'}\n"
        f"data: {{train: {asked.data.resolve()}, max_length: {asked.max_length}, template: alpaca}}\n"
        f"batch: {{size: {asked.batch}}}\nadapter: {{kind: lora, rank: 16}}\nduration: 1 epoch\n"
    )
    given: dict[str, Any] = dict(load_config(path).given)
    space = _space(given)
    held = dict(space.start) | {axis.key: axis.auto for axis in space.axes if axis.auto is not None} | _HELD
    return with_settings(given, {key: value for key, value in held.items() if key not in asked.keys})


def _spent() -> float:
    """Seconds of processor time of this process and of all that it has waited for."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


if __name__ == "__main__":
    main()
