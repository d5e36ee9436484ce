"""surefoot beside HF Trainer + PEFT, TRL and LLaMA-Factory, by a protocol that cannot flatter.

    python benchmarks/peers.py --adapter lora --league tuned [--size small] [--rounds 3]
                               [--trl trl/bin/python] [--llamafactory lf/bin/python]     with the same torch in each

Same weights (base and first adapter), same examples in the same order per optimizer step, same AdamW, rate and clip.
Every turn of every side is a fresh process; sides take turns. Losses of all steps have to agree with surefoot's own
plain fp32 path before a time is printed; a side that does not agree is shown as failed. Rates count real tokens.
Memory is the peak above what the process held after its imports.

Leagues:
    defaults  what a new user gets: each side's own settings, examples in random order
    tuned     the peers at their best here: no checkpointing, examples of a step grouped by length, micro-batches of 8,
              and bf16 autocast over a base in fp32 or in bf16, whichever is faster
    equal     every example has the same length and all its tokens are learned: no padding to save, no head to skip
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput import build_base

WARM_UP = 2  # steps of each turn that are not counted
# Of the losses of single steps, relative to the plain fp32 path's. 16-bit products differ by some thousandths at first
# and drift apart as they train; a wrong mask, shift or normaliser is off by tenths.
PARITY = 2e-2
SIZES = {"tiny": (4, 256, 8_000), "small": (12, 768, 32_000), "vocabulary": (12, 768, 128_000)}
LR = 2e-4


@dataclass(frozen=True)
class Side:
    """name: as printed. arm: of peer_arms.py. python: its interpreter. settings: what the arm is asked."""

    name: str
    arm: str
    python: str
    settings: dict[str, Any]


def sides(asked: argparse.Namespace) -> list[Side]:
    own = Side("surefoot", "ours", sys.executable, {"overrides": []})
    plain = {"checkpointing": False, "grouped": asked.league != "defaults"}
    micro = 8 if asked.league != "defaults" else asked.batch
    kinds = {
        "autocast": {**plain, "weights": "fp32", "autocast": True, "micro": micro},
        "bf16 weights": {**plain, "weights": "bf16", "autocast": True, "micro": micro},
    }
    if asked.adapter == "full":
        del kinds["bf16 weights"]  # bf16 weights that train lose small updates: another method
    if asked.league == "defaults":
        kinds = {"defaults": {**plain, "weights": "fp32", "autocast": False, "micro": micro}}
    found = [own, *(Side(f"HF + PEFT, {name}", "trainer", sys.executable, kind) for name, kind in kinds.items())]
    if asked.trl:
        if asked.league == "defaults":
            kinds = {"defaults": {**plain, "weights": "fp32", "autocast": True, "micro": micro, "checkpointing": True}}
        found += [Side(f"TRL, {name}", "trl", asked.trl, kind) for name, kind in kinds.items()]
    if asked.llamafactory:
        kind = {**kinds.get("autocast", kinds.get("defaults", {})), "checkpointing": asked.league == "defaults"}
        found.append(Side("LLaMA-Factory", "llamafactory", asked.llamafactory, kind | {"autocast": True}))
    return found


def write_world(folder: Path, asked: argparse.Namespace) -> int:
    """Base, first adapter, config and examples by step; returns the real tokens of the counted steps."""
    from surefoot.config.load import load_config
    from surefoot.data.order import step_examples
    from surefoot.stages.trial import ready

    layers, hidden, vocabulary = SIZES[asked.size]
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    data = folder / "data.json"
    if asked.league == "equal":
        words = " ".join(record["output"] for record in records).split()
        records = [{"text": " ".join(words[at : at + 600])} for at in range(0, len(words) - 600, 150)]
    data.write_text(json.dumps(records))
    texts = [" ".join(str(value) for value in record.values()) for record in records]
    build_base(folder / "base", texts, layers, hidden, vocabulary)
    adapter = "" if asked.adapter == "full" else f"adapter: {{kind: {asked.adapter}, rank: 32, alpha: 64}}\n"
    fixed = asked.league == "equal"
    (folder / "run.yaml").write_text(
        f"stage: {'pretrain' if fixed else 'sft'}\nmodel: {folder / 'base'}\noutput: {folder / 'run'}\n"
        f"data: {{train: {data}, max_length: 512{'' if fixed else ', template: alpaca'}}}\n"
        f"batch: {{size: {asked.batch}}}\n"
        f"optim: {{lr: {LR}, schedule: constant, warmup: 0.0}}\nduration: {asked.steps} steps\n{adapter}"
    )
    config = load_config(folder / "run.yaml").config
    with ready(config, 1) as one:
        if config.adapter is not None:
            one.setup.write_model(folder / "adapter")
        train, steps, tokens = one.run.stage.data.train, [], 0
        for step in range(1, asked.steps + 1):
            _, indices = step_examples(config.seed, step - 1, one.run.stage.data.mixture, asked.batch)
            steps.append([])
            for index in indices:
                example = train[int(index)]
                labels = example.ids.copy()
                labels[~example.supervised] = -100
                steps[-1].append({"input_ids": example.ids.tolist(), "labels": labels.tolist()})
                tokens += len(example.ids) if step > WARM_UP else 0
    (folder / "examples.json").write_text(json.dumps(steps))
    return tokens


def turn(side: Side, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    settings = {"steps": asked.steps, "batch": asked.batch, "lr": LR, "threads": asked.threads, **side.settings}
    command = [side.python, str(Path(__file__).with_name("peer_arms.py")), side.arm, str(folder), json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if done.returncode:
        sys.exit(f"{side.name} broke off:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def off_by(found: dict[str, Any], reference: list[float]) -> float:
    """Largest relative difference of a step's loss."""
    return max(abs(one - other) / abs(other) for one, other in zip(found["losses"], reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--adapter", choices=["lora", "dora", "full"], default="lora")
    parser.add_argument("--league", choices=["defaults", "tuned", "equal"], default="tuned")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trl", metavar="PYTHON", help="Interpreter of an environment with TRL.")
    parser.add_argument("--llamafactory", metavar="PYTHON", help="Interpreter of an environment with LLaMA-Factory.")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    with tempfile.TemporaryDirectory() as temporary:
        compare(Path(temporary), asked)


def compare(folder: Path, asked: argparse.Namespace) -> None:
    tokens = write_world(folder, asked)
    plain = ["precision=fp32", "attention=eager", "kernels.adapter=plain"]
    reference = turn(Side("plain", "ours", sys.executable, {"overrides": plain}), folder, asked)["losses"]
    contestants, found = sides(asked), {}
    for number in range(asked.rounds):
        for side in contestants[number % 2 :] + contestants[: number % 2]:
            one = turn(side, folder, asked)
            found.setdefault(side.name, []).append(one)
            print(f"round {number + 1}: {side.name}: {sum(one['seconds'][WARM_UP:]):.1f} s", flush=True)
    print(f"\n{asked.league}, {asked.adapter}, {asked.size}, batch {asked.batch}, {asked.threads} threads")
    heads = f"{'tok/s':>7} {'least':>7} {'most':>7} {'cpu tok/s':>9} {'MiB':>6} {'first step':>10} {'off by':>8}"
    print(f"{'side':<26} {heads}")
    rates = {}
    for name, turns in found.items():
        off = max(off_by(one, reference) for one in turns)
        speeds = [tokens / sum(one["seconds"][WARM_UP:]) for one in turns]
        work = statistics.median(tokens / sum(one["processor"][WARM_UP:]) for one in turns)
        memory = statistics.median(one["memory"] for one in turns) / 2**20
        first = statistics.median(one["first_step"] for one in turns)
        verdict = "" if off <= PARITY else "  NO PARITY: not counted"
        rates[name] = (statistics.median(speeds), work, memory) if off <= PARITY else None
        print(
            f"{name:<26} {statistics.median(speeds):>7,.0f} {min(speeds):>7,.0f} {max(speeds):>7,.0f} {work:>9,.0f} "
            f"{memory:>6,.0f} {first:>8.1f} s {off:>8.1e}{verdict}"
        )
    own = rates.pop("surefoot")
    peers = [rate for rate in rates.values() if rate]
    if own and peers:
        best = max(peers)
        print(
            f"surefoot to the best peer: {own[0] / best[0]:.2f} times the tokens/s "
            f"({own[1] / best[1]:.2f} by processor time), {own[2] / best[2]:.2f} of the memory"
        )


if __name__ == "__main__":
    main()
