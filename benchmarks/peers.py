"""surefoot beside HF Trainer + PEFT, Liger, Unsloth, TRL and LLaMA-Factory, by a protocol that cannot flatter.

    python benchmarks/peers.py --adapter lora --league tuned [--size small] [--rounds 3] [--keep FOLDER] [--json FILE]
                               [--trl trl/bin/python] [--llamafactory lf/bin/python]     with the same torch in each
    python benchmarks/peers.py --device cuda --size 8b --league equal --length 4096 --rank 16 --micro 2 --batch 8
                               [--liger PYTHON] [--unsloth PYTHON]         gpu_cells.py has these lines for one GPU

Same weights (base and first adapter), same examples in the same order per optimizer step, same AdamW, rate and clip.
Every turn of every side is a fresh process; sides take turns. Losses of all steps, and the gradient norm of the first,
have to agree with surefoot's own plain fp32 path before a time is printed; a side that does not agree is shown as
failed, and one that breaks off (as where memory runs out) as broken off. Of large models the plain fp32 path takes the
first step alone; losses after it are compared with surefoot's own. Rates count real tokens.

On a CPU memory is the peak above what the process held after its imports, on a GPU the most that torch had allocated,
and beside it the most that it had reserved. "of limit": the matrix products that the maths needs for these tokens, at
the rate that this machine multiplies matrices of the model's shapes, over the time taken.

`peer_sides.py` says who takes part and what a league is, `peer_world.py` what they train on, `peer_arms.py` how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bases import SIZES
from fresh import BrokeOff, told_by
from peer_sides import OWN, REFERENCE, Side, reference_of, sides
from peer_world import LENGTH, LR, RANK, TEMPLATE, World, make_world

WARM_UP = 2  # steps of each turn that are not counted
# Of the losses of single steps, relative to the plain fp32 path's. A base with random weights knows nothing, so faults
# move its loss by little: labels shifted by two 2.5e-3, not shifted at all 3.4e-3, prompts that are learned too 6.8e-3
# (five LoRA steps of a small Llama). 16-bit products were seen to move it by 2.4e-4.
PARITY = 1e-3
# Of the gradient norm of step 1, where all have the same weights; it sees what the loss does not, such as positions.
NORM_PARITY = 2e-2
# Of a large model. Its fp32 steps are slow, and after an update in 16 bits they are no measure: of 8 B parameters
# (H200) surefoot and HF + Liger both lost 1.4e-3 more than the plain path in step 2 and agreed to 2e-6.
LARGE_PARITY_STEPS = 1


def arguments() -> argparse.ArgumentParser:
    """What `operators.py` takes as well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--adapter", choices=["lora", "dora", "full"], default="lora")
    parser.add_argument("--league", choices=["defaults", "tuned", "equal"], default="tuned")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="The GPU where there is one, unless this says cpu.")
    parser.add_argument("--length", type=int, default=LENGTH, help="Tokens of an example at most.")
    parser.add_argument("--rank", type=int, default=RANK, help="Of the adapter.")
    parser.add_argument("--template", default=TEMPLATE, help="How the records of --data become text.")
    parser.add_argument("--batch", type=int, default=24, help="Examples of an optimizer step.")
    parser.add_argument("--micro", type=int, help="Examples of a micro-batch on every side, surefoot's own too.")
    parser.add_argument("--steps", type=int, default=5, help=f"Of each turn; the first {WARM_UP} are not counted.")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trl", metavar="PYTHON", help="Interpreter of an environment with TRL.")
    parser.add_argument("--llamafactory", metavar="PYTHON", help="Interpreter of an environment with LLaMA-Factory.")
    parser.add_argument("--liger", metavar="PYTHON", help="Interpreter that has liger-kernel, if this one has not.")
    parser.add_argument("--unsloth", metavar="PYTHON", help="Interpreter of an environment with Unsloth.")
    parser.add_argument("--sides", nargs="+", metavar="WORDS", help="Only peers whose name contains one of these.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Where bases, examples and references are kept.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Everything that was measured.")
    parser.add_argument("--from-python", action="store_true", help="surefoot as it runs from Python, not from its CLI.")
    return parser


def checked(asked: argparse.Namespace) -> argparse.Namespace:
    """What was asked for, with the device in it."""
    import torch

    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    if asked.batch % 8:
        sys.exit("--batch: a multiple of 8, so that peers have whole micro-batches")
    if asked.micro is not None and (asked.micro < 1 or asked.batch % asked.micro):
        sys.exit(f"--micro: a part of --batch, {asked.batch}, that goes into it without a rest")
    if asked.steps <= WARM_UP:
        sys.exit(f"--steps: more than {WARM_UP}")
    there = torch.cuda.is_available()
    asked.device = asked.device or ("cuda" if there else "cpu")
    if asked.device == "cuda" and not there:
        sys.exit("--device: torch sees no GPU here")
    if asked.device == "cpu" and there:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all sides take the GPU that they see
    return asked


def turn(side: Side, world: World, asked: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """more: settings beside the side's own. Raises BrokeOff."""
    script = str(Path(__file__).with_name("peer_arms.py"))
    command = [side.python, script, side.arm, str(world.folder), json.dumps(settings_of(side, asked, **more))]
    count = str(asked.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    if side.python != sys.executable:
        environment.pop("PYTHONPATH", None)
    load = os.getloadavg()[0]
    return told_by(command, environment) | {"load_before": load}


def settings_of(side: Side, asked: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What an arm is told: of everybody, of the side, of this turn."""
    common = {name: getattr(asked, name) for name in ("steps", "batch", "length", "device")}
    return {**common, "lr": LR, **side.settings, **more}


def parity_steps(asked: argparse.Namespace) -> int:
    return min(asked.steps, LARGE_PARITY_STEPS) if SIZES[asked.size].large else asked.steps


def off_by(found: Sequence[float | None], reference: Sequence[float | None]) -> float:
    """Largest relative difference of the first ones, as many as the reference has; infinite where one is none."""
    pairs = zip(found[: len(reference)], reference, strict=True)
    return max(float("inf") if one is None or other is None else abs(one - other) / abs(other) for one, other in pairs)


def compare(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    world = make_world(folder, asked)
    steps = parity_steps(asked)
    reference = world.reference(steps, lambda: turn(reference_of(asked.size), world, asked, steps=steps))
    reference = {name: reference[name][:steps] for name in ("losses", "norms")}
    print(f"base, examples and reference: {time.monotonic() - began:.0f} s", flush=True)
    contestants = sides(asked, world.longest)
    found, broken = take_turns(
        contestants,
        asked.rounds,
        lambda side: turn(side, world, asked),
        left=lambda: float("inf") if asked.minutes is None else 60 * asked.minutes - (time.monotonic() - began),
    )
    rows = [
        _row(side.name, found[side.name], world, reference, found[OWN])
        for side in sorted(contestants, key=lambda side: side.name != OWN)
        if side.name in found
    ]
    return {
        "asked": {name: str(value) for name, value in vars(asked).items()},
        "machine": machine(),
        "tokens": world.tokens,
        "supervised": world.supervised,
        "reference": reference["losses"],
        "rows": rows,
        "broken": broken,
        "turns": found,
    }


def take_turns(
    contestants: Sequence[Side],
    rounds: int,
    take: Callable[[Side], dict[str, Any]],
    *,
    left: Callable[[], float],
    now: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Turns of each side, and why others have none: the last line of one that broke off, or no time. take: raises
    BrokeOff, which ends the program where it is surefoot that did. left: seconds; a turn for which as many as the
    longest so far took are not left does not begin, but surefoot's first."""
    found, broken, longest = dict[str, list[dict[str, Any]]](), dict[str, str](), 0.0
    for number in range(rounds):
        start = number % len(contestants)
        for side in [*contestants[start:], *contestants[:start]]:
            if side.name in broken:
                continue
            if found and left() < longest:
                if side.name not in found:
                    broken[side.name] = "left out: no time"
                continue
            began = now()
            try:
                one = take(side)
            except BrokeOff as fault:
                if side.name == OWN:
                    raise
                found.pop(side.name, None)
                broken[side.name] = f"broke off: {str(fault).strip().splitlines()[-1][:200]}"
                print(f"round {number + 1}: {side.name} {broken[side.name]}", flush=True)
                continue
            longest = max(longest, now() - began)
            found.setdefault(side.name, []).append(one)
            seconds, work = sum(one["seconds"][WARM_UP:]), sum(one["processor"][WARM_UP:])
            print(
                f"round {number + 1}: {side.name}: {seconds:.1f} s ({work:.1f} s of processors), "
                f"load before {one['load_before']:.1f}",
                flush=True,
            )
    return found, broken


def machine() -> dict[str, str]:
    from surefoot.system import hardware

    now = datetime.datetime.now(datetime.UTC)
    found = {"name": hardware.detect().name, "cores": str(os.cpu_count()), "date": f"{now:%Y-%m-%d %H:%M} UTC"}
    told = hardware.describe()
    device = {name: str(value) for name, value in told["device"].items() if name in ("cuda", "cudnn", "driver")}
    return found | ({"processor": told["cpu"], **device} if device else {})


def _row(
    name: str, turns: list[dict[str, Any]], world: World, reference: dict[str, Any], own: list[dict[str, Any]]
) -> dict[str, Any]:
    """own: surefoot's turns, which know what the maths needs and how fast the machine multiplies."""
    tokens = sum(world.tokens[WARM_UP:])
    rates = [tokens / sum(one["seconds"][WARM_UP:]) for one in turns]
    rate = statistics.median(rates)
    wanted = [*reference["losses"], *own[0]["losses"][len(reference["losses"]) :]]
    limit = max(one["rate"] or 0.0 for one in own) / sum(own[0]["needed"][WARM_UP:]) * tokens
    return {
        "name": name,
        "rate": rate,
        "least": min(rates),
        "most": max(rates),
        "by_processor": statistics.median(tokens / sum(one["processor"][WARM_UP:]) for one in turns),
        "of_limit": rate / limit if limit else None,
        "memory": statistics.median(one["memory"] for one in turns),
        "reserved": statistics.median(one["reserved"] for one in turns) if "reserved" in turns[0] else None,
        "first_step": statistics.median(one["first_step"] for one in turns),
        "off": max(off_by(one["losses"], wanted) for one in turns),
        "norm_off": max(off_by(one["norms"][:1], reference["norms"][:1]) for one in turns),
        "losses": turns[0]["losses"],
        "versions": turns[0]["versions"],
        "threads": turns[0]["threads"],
    }


def show(found: dict[str, Any]) -> None:
    rows, asked, here = found["rows"], found["asked"], found["machine"]
    words = f"{asked['league']}, {asked['adapter']}, {asked['size']}, {asked['batch']} examples a step"
    gpu = asked["device"] == "cuda"
    print(f"\n{here['date']}, {here['name']}, {here['cores']} cores{_of_gpu(here, rows[0]['versions']) if gpu else ''}")
    print(f"{words}, {sum(found['tokens'][WARM_UP:]):,} tokens counted, threads: {asked['threads']}")
    width = max(len(row["name"]) for row in rows)
    heads = f"{'tok/s':>7} {'least':>7} {'most':>7} {'cpu tok/s':>9} {'of limit':>8} {'MiB':>7} {'first step':>10}"
    print(f"{'side':<{width}} {heads} {'off by':>8} {'norm by':>8}{' reserved' if gpu else ''}")
    for row in rows:
        verdict = "" if _has_parity(row) else "  NO PARITY: not counted"
        limit = f"{row['of_limit']:.1%}" if row["of_limit"] else "-"
        work = "-" if gpu else f"{row['by_processor']:,.0f}"  # of the processor, which mostly waits there
        reserved = f" {row['reserved'] / 2**20:>8,.0f}" if gpu else ""
        print(
            f"{row['name']:<{width}} {row['rate']:>7,.0f} {row['least']:>7,.0f} {row['most']:>7,.0f} "
            f"{work:>9} {limit:>8} {row['memory'] / 2**20:>7,.0f} {row['first_step']:>8.1f} s "
            f"{row['off']:>8.1e} {row['norm_off']:>8.1e}{reserved}{verdict}"
        )
    for name, why in found["broken"].items():
        print(f"{name}: {why}")
    steps = len(rows[0]["losses"])
    print(f"\n{'losses':<{width}}  {'  '.join(f'step {step}' for step in range(1, steps + 1))}")
    for name, losses in [(REFERENCE.name, found["reference"]), *((row["name"], row["losses"]) for row in rows)]:
        print(f"{name:<{width}}  {'  '.join('  none' if loss is None else f'{loss:6.4f}' for loss in losses)}")
    _verdict(rows, gpu)


def _of_gpu(here: dict[str, str], versions: dict[str, str]) -> str:
    own = [f"{name} {here[name]}" for name in ("cuda", "cudnn", "driver") if here.get(name)]
    return f", {', '.join([*own, *(f'{name} {versions[name]}' for name in ('torch', 'triton') if name in versions)])}"


def _has_parity(row: dict[str, Any]) -> bool:
    return row["off"] <= PARITY and row["norm_off"] <= NORM_PARITY


def _verdict(rows: Sequence[dict[str, Any]], gpu: bool) -> None:
    own, *others = rows
    peers = [row for row in others if _has_parity(row)]
    if not _has_parity(own) or not peers:
        print("\nno ratio: surefoot or every peer is without parity")
        return
    best = max(peers, key=lambda row: row["rate"])
    least = min(row["memory"] for row in peers)
    work = own["by_processor"] / max(row["by_processor"] for row in peers)
    print(
        f"\nsurefoot to the fastest peer ({best['name']}): {own['rate'] / best['rate']:.2f} times the tokens/s, "
        f"{own['memory'] / best['memory']:.2f} of its memory; {'' if gpu else f'{work:.2f} times by processor time; '}"
        f"{own['memory'] / least:.2f} of the memory of the peer that takes least"
    )


def main() -> None:
    parser = arguments()
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="Begin no turn that would outlast so many.")
    asked = checked(parser.parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        found = compare(asked.keep or Path(temporary), asked)
    show(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
