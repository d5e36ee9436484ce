"""Where the time of a step goes, by groups of operators, in surefoot and in HF Trainer + PEFT tuned.

    python benchmarks/operators.py --adapter lora [--size small] [--keep FOLDER] [--json FILE]
                                   [--sides "bf16 weights, micro 8"]

Both sides train as in `peers.py`; the last step is traced, which makes it slower, so seconds are scaled to the median
of the steps before it. Beside each group stands the least that this machine could take for what the maths needs of it:
matrix products at the rate of matrices of the model's shapes, everything else by what has to be read and written at
the rate of a copy. All threads are counted in both rates. Tracing slows small operators down more than large ones.

    norms, activation, rotary   `bases.moved_bytes` of a token
    optimizer                   28 bytes for each number that trains: weight, gradient and two moments read, all but the
                                gradient written
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bases import SIZES, moved_bytes
from operator_groups import ADAPTER, ATTENTION, BASE, ELEMENTS, GROUPS, HEAD, OPTIMIZER
from peer_sides import OWN, Side, sides
from peer_world import World, make_world
from peers import WARM_UP, arguments, checked, machine, turn

_DEFAULT = {"full": "HF + PEFT, autocast, micro 8"}


def main() -> None:
    parser = arguments()
    parser.description = __doc__.splitlines()[0]
    parser.set_defaults(device="cpu")
    asked = checked(parser.parse_args())
    if asked.device != "cpu":
        sys.exit("--device: operators are traced on a CPU; `surefoot train --profile` tells those of a GPU")
    asked.sides = asked.sides or [_DEFAULT.get(asked.adapter, "HF + PEFT, bf16 weights, micro 8")]
    with tempfile.TemporaryDirectory() as temporary:
        world = make_world(asked.keep or Path(temporary), asked)
        words = json.loads((world.folder / "base" / "config.json").read_text())["vocab_size"]
        dimensions = {"vocabulary": words} | ({} if asked.adapter == "full" else {"rank": asked.rank})
        limits = least(world, asked)
        found = {side.name: measured(side, world, asked, dimensions) for side in sides(asked, world.longest)}
    print(f"\n{machine()['date']}, {machine()['name']}, threads: {asked.threads}")
    print(f"{asked.adapter}, {asked.size}, one step of {asked.batch} examples, {world.tokens[-1]:,} tokens")
    for name, one in found.items():
        show(name, one, limits)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "least": limits, "sides": found}, indent=1) + "\n")


def measured(side: Side, world: World, asked: argparse.Namespace, dimensions: dict[str, int]) -> dict[str, Any]:
    """seconds: of an ordinary step. groups: of the traced one, scaled to it."""
    one = turn(side, world, asked, traced=True, dimensions=dimensions)
    rates = [tokens / s for tokens, s in zip(world.tokens, one["seconds"], strict=True)]
    ordinary = world.tokens[-1] / statistics.median(rates[WARM_UP:-1] or rates[:-1])
    traced = one["seconds"][-1]
    groups = one["operators"]
    for group in groups.values():
        group["share"] = group["seconds"] / traced
        group["seconds"] = group["share"] * ordinary
        group["names"] = [(name, seconds / traced * ordinary) for name, seconds in group["names"]]
    return {"seconds": ordinary, "traced": traced, "groups": groups}


def least(world: World, asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of each group of the last step at this machine's rates."""
    import torch

    from surefoot.config.load import load_config
    from surefoot.models.facts import facts_of
    from surefoot.planning.limits import attention_flops, step_flops, work_of
    from surefoot.planning.probes.timing import copy_rate
    from surefoot.runs.make_plan import make_plan
    from surefoot.runs.profiling import arithmetic_of, product_rate

    config = load_config(world.folder / "run.yaml").config
    plan = make_plan(config, measure=False)
    arithmetic = arithmetic_of(
        replace(plan, threads=replace(plan.threads, value=asked.threads)), config.stage, world.folder / "base"
    )
    model = facts_of(world.folder / "base")
    rows = json.loads((world.folder / "examples.json").read_text())[-1]
    work = work_of((len(row["input_ids"]) for row in rows), world.supervised[-1])
    rate = product_rate(arithmetic)
    assert rate is not None
    copied = copy_rate(torch.device("cpu")) * asked.threads
    thin = None if plan.adapter is None else replace(plan.adapter, rank=0)
    whole = step_flops(model, work, plan.adapter).needed
    added = whole - step_flops(model, work, thin).needed if plan.adapter else 0.0
    head = whole - step_flops(model, work, plan.adapter, head=False).needed
    pairs = 3 * attention_flops(model, work.squares, work.tokens)
    moved = moved_bytes(SIZES[asked.size]) * work.tokens
    trained = (
        plan.adapter.trainable
        if plan.adapter
        else sum(parameter.numel() for parameter in _parameters(world.folder / "base"))
    )
    return {
        BASE: (whole - added - head - pairs) / rate,
        ADAPTER: added / rate,
        ATTENTION: pairs / rate,
        HEAD: head / rate,
        ELEMENTS: moved / copied,
        OPTIMIZER: 28 * trained / copied,
        "rate, TFLOP/s": rate / 1e12,
        "copy, GB/s": copied / 1e9,
    }


def _parameters(base: Path) -> list[Any]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(base).parameters())


def show(name: str, one: dict[str, Any], limits: dict[str, float]) -> None:
    print(f"\n{name}: {one['seconds']:.2f} s a step (traced {one['traced']:.2f} s)")
    print(f"  {'operators':<34} {'s':>7} {'share':>6} {'least, s':>9} {'TFLOP/s':>8}")
    for group in GROUPS:
        own = one["groups"][group]
        limit = f"{limits[group]:.3f}" if group in limits else "-"
        rate = f"{own['flops'] / own['seconds'] / 1e12:.2f}" if own["flops"] and own["seconds"] else "-"
        print(f"  {group:<34} {own['seconds']:>7.3f} {own['share']:>6.1%} {limit:>9} {rate:>8}")
    rest = one["seconds"] - sum(own["seconds"] for own in one["groups"].values())
    print(f"  {'between operators, and data':<34} {rest:>7.3f} {rest / one['seconds']:>6.1%} {'-':>9} {'-':>8}")
    for group in GROUPS:
        names = ", ".join(f"{name} {seconds:.3f}" for name, seconds in one["groups"][group]["names"][:3])
        print(f"    {group}: {names}")
    if name == OWN:
        print(f"  products: {limits['rate, TFLOP/s']:.2f} TFLOP/s; copying: {limits['copy, GB/s']:.1f} GB/s")


if __name__ == "__main__":
    main()
