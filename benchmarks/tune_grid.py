"""Does `surefoot tune` find what a full grid finds, and in how much of its time?

    python benchmarks/tune_grid.py [--keys precision.compute data.packing …] [--json FILE]

For two sizes of a random Llama on short instructions: first the search, then every combination of the same values with
trials of the same length, then the search's best and the grid's best again in turns, which decides. Keys that are not
named stay as the plan has them. Runs on an idle machine; trials take seconds each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import machine
from throughput import build_base

from surefoot import hardware
from surefoot.config.load import check_config, load_config
from surefoot.config.nested import put
from surefoot.planning.measurements import measurements_from_json
from surefoot.stages.planned import make_plan
from surefoot.tune.attempt import attempt
from surefoot.tune.run import tune
from surefoot.tune.search import grid
from surefoot.tune.space import given_keys, make_space

SIZES = {"2 layers, 256 wide": (2, 256), "4 layers, 512 wide": (4, 512)}
# What stays as it is unless it is named: compiling and threads cost minutes of a grid and win nothing in such a run.
_HELD = {"compile": "off", "data.workers": 0, "gradient_checkpointing": "off"}
_ROUNDS = 2
_TURNS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="Keys to vary; without: all that tune varies.")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="Of the timed steps of a trial, about.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    print(f"{machine()['date']}, {machine()['name']}, {machine()['cores']} cores", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        found = {size: compare(size, Path(temporary), asked) for size in asked.sizes}
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "sizes": found}, indent=1, default=str) + "\n")


def compare(size: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    given = _given(size, folder, asked)
    started = time.perf_counter()
    tuned = tune(given, seconds=asked.seconds, told=lambda tried: None, said=lambda words: None)
    searching = time.perf_counter() - started
    config = check_config(given)
    plan = make_plan(config)
    space = make_space(
        config, set(given_keys(given)), plan, hardware.detect(), measurements_from_json(plan.measurements)
    )
    started, rates = time.perf_counter(), []
    for settings in grid(space.axes):
        answer = attempt(_with(given, settings), steps=tuned.steps, rounds=_ROUNDS, limit=None)
        rates.append((answer.trial.rate if answer.trial else 0.0, settings, answer.failure))
    gridding = time.perf_counter() - started
    best = max(rates, key=lambda one: one[0])
    own, other = _in_turns(tuned.config, _with(given, best[1]), tuned.steps)
    changed = dict(tuned.best.settings)
    print(
        f"\n{size}: {len(rates)} combinations in {gridding:.0f} s; {len(tuned.tried)} trials in {searching:.0f} s, "
        f"{searching / gridding:.0%} of it\n  tune's best  {own:>8,.0f} tok/s  {changed}\n"
        f"  grid's best  {other:>8,.0f} tok/s  {best[1]}\n  tune's best is at {own / other:.1%} of the grid's",
        flush=True,
    )
    return {
        "searching": searching,
        "gridding": gridding,
        "tried": len(tuned.tried),
        "combinations": rates,
        "tune": [own, changed],
        "grid": [other, best[1]],
    }


def _in_turns(one: dict[str, Any], other: dict[str, Any], steps: int) -> tuple[float, float]:
    """The best rate of each."""
    rates = [[_rate(config, steps) for config in (one, other)] for _ in range(_TURNS)]
    return max(pair[0] for pair in rates), max(pair[1] for pair in rates)


def _rate(config: dict[str, Any], steps: int) -> float:
    answer = attempt(config, steps=steps, rounds=_ROUNDS, limit=None)
    return answer.trial.rate if answer.trial else 0.0


def _given(size: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """A config as plain values that holds what is not to be varied."""
    base = folder / size.replace(" ", "-").replace(",", "")
    texts = [" ".join(record.values()) for record in json.loads(asked.data.read_text(encoding="utf-8"))]
    build_base(base, texts, *SIZES[size])
    path = folder / f"{base.name}.yaml"
    path.write_text(
        f"stage: sft\nmodel: {base}\noutput: {folder / 'run'}\n"
        f"data: {{train: {asked.data.resolve()}, max_length: 512, template: alpaca}}\n"
        f"batch: {{size: {asked.batch}}}\nadapter: {{kind: lora, rank: 16}}\nduration: 1 epoch\n"
    )
    given: dict[str, Any] = dict(load_config(path).given)
    if asked.keys:
        config = check_config(given)
        plan = make_plan(config)
        seen = measurements_from_json(plan.measurements)
        space = make_space(config, set(given_keys(given)), plan, hardware.detect(), seen)
        started = {axis.key: space.start[axis.key] for axis in space.axes}
        held = {axis.key: axis.auto if started[axis.key] == "auto" else started[axis.key] for axis in space.axes}
        given = _with(given, {key: value for key, value in (held | _HELD).items() if key not in asked.keys})
    return given


def _with(given: dict[str, Any], settings: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(given))
    for key, value in settings.items():
        put(changed, key, value)
    return changed


if __name__ == "__main__":
    main()
