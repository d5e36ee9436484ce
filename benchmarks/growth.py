"""How a run grows with its data, and with the depth and the width of its model.

    python benchmarks/growth.py [--counts 1000 10000 100000]
    python benchmarks/growth.py --models 2x256 4x256 8x256 4x512 4x1024

Data: start, second start and tokens per second of the steps. Models: what a token needs by arithmetic beside what it
takes. Every line is a fresh process with a cache of its own, on one thread. "tokeniser" is the fast tokenizer alone
over the same prompts and answers: nobody can start faster the first time. All times are processor time without the
imports, so that other programs on the machine stretch them little. What a start does however many examples there are:
plan, load the model, and hold every fast path against the plain one on real micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from throughput import build_base

STEPS = 12
WARM_UP = 2


def write_world(folder: Path, count: int, records: list[dict]) -> None:
    """count records: the given ones over and over, numbered, so that no two are the same."""
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            record = records[number % len(records)]
            file.write(json.dumps({**record, "instruction": f"{number}. {record['instruction']}"}) + "\n")
    (folder / "run.yaml").write_text(
        f"stage: sft\nmodel: {folder.parent / 'base'}\noutput: {folder / 'run'}\n"
        f"data: {{train: {folder / 'data.jsonl'}, max_length: 512, template: alpaca}}\nbatch: {{size: 8}}\n"
        f"adapter: {{kind: lora, rank: 8}}\nduration: {STEPS} steps\nprecision: fp32\nattention: sdpa\n"
    )


def measure(folder: Path) -> dict[str, float]:
    """In this process: seconds to the first step, tokens a second of the steps, GFLOP that a token needs."""
    import peft  # noqa: F401  imports are not counted
    import transformers  # noqa: F401

    from surefoot.config.load import load_config
    from surefoot.stages.arithmetic import step_work
    from surefoot.stages.profiling import arithmetic_of
    from surefoot.stages.trial import ready

    config = load_config(folder / "run.yaml").config
    started = time.process_time()
    with ready(config, STEPS) as one:
        start = time.process_time() - started
        arithmetic = arithmetic_of(one.plan, config.stage, Path(config.model.path))
        seconds, tokens, needed = 0.0, 0, 0.0
        for number in range(1, STEPS + 1):
            began = time.process_time()
            batches = one.batches(number)
            report = one.step(number, batches)
            if number > WARM_UP:
                seconds += time.process_time() - began
                tokens += report.tokens
                needed += arithmetic.flops(step_work(batches)).needed
        data = one.run.stage.data.train
        return {
            "start": start,
            "rate": tokens / seconds,
            "tokens": float(data.lengths.sum()),
            "needed": needed / tokens / 1e9,
        }


def tokeniser_alone(folder: Path) -> float:
    """Processor seconds for all prompts and answers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.parent / "base").backend_tokenizer
    rows = [json.loads(line) for line in (folder / "data.jsonl").open(encoding="utf-8")]
    texts = [text for row in rows for text in (row["instruction"] + row["input"], row["output"])]
    started = time.process_time()
    for at in range(0, len(texts), 1000):
        tokenizer.encode_batch(texts[at : at + 1000], add_special_tokens=False)
    return time.process_time() - started


def child(what: str, folder: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--child", what, str(folder)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    if "--child" in sys.argv:
        what, folder = sys.argv[2], Path(sys.argv[3])
        print(json.dumps({"seconds": tokeniser_alone(folder)} if what == "tokeniser" else measure(folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--models", nargs="+", metavar="LAYERSxWIDTH", help="Grow the model in place of the data.")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        if asked.models:
            grow_model(Path(temporary), records, asked.models)
        else:
            grow_data(Path(temporary), records, asked.counts)


def grow_data(folder: Path, records: list[dict], counts: list[int]) -> None:
    heads = f"{'first start':>12} {'tokeniser':>10} {'second start':>13} {'tok/s of a step':>16}"
    print(f"{'examples':>9} {'tokens':>12} {heads}")
    build_base(folder / "base", [" ".join(record.values()) for record in records], 2, 256)
    for count in counts:
        own = folder / str(count)
        own.mkdir()
        write_world(own, count, records)
        first, alone, second = child("run", own), child("tokeniser", own)["seconds"], child("run", own)
        starts = f"{first['start']:>10.1f} s {alone:>8.1f} s {second['start']:>11.1f} s"
        print(f"{count:>9,} {first['tokens']:>12,.0f} {starts} {second['rate']:>16,.0f}", flush=True)


def grow_model(folder: Path, records: list[dict], models: list[str]) -> None:
    print(f"{'model':>9} {'GFLOP a token':>14} {'ms a token':>11} {'GFLOP/s':>9}")
    texts = [" ".join(record.values()) for record in records]
    for model in models:
        layers, width = map(int, model.split("x"))
        own = folder / model / "data"
        own.mkdir(parents=True)
        build_base(folder / model / "base", texts, layers, width)
        write_world(own, len(records), records)
        found = child("run", own)
        took, rate = 1000 / found["rate"], found["needed"] * found["rate"]
        print(f"{model:>9} {found['needed']:>14.4f} {took:>11.3f} {rate:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
