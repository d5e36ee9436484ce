"""How a run grows with its data: start, second start, tokens per second of the steps, from 1,000 to 100,000 examples.

    python benchmarks/growth.py [--counts 1000 10000 100000]

Every line is a fresh process with a cache of its own. "tokeniser alone" is the fast tokenizer over the same prompts and
answers in one thread: nobody can start faster the first time. Times are without the imports.
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
    """In this process, whose imports are done: seconds to the first step, tokens a second of the steps."""
    from surefoot.config.load import load_config
    from surefoot.stages.trial import ready

    config = load_config(folder / "run.yaml").config
    started = time.perf_counter()
    with ready(config, STEPS) as one:
        start = time.perf_counter() - started
        seconds, tokens = 0.0, 0
        for number in range(1, STEPS + 1):
            began = time.process_time()
            report = one.step(number, one.batches(number))
            if number > WARM_UP:
                seconds += time.process_time() - began
                tokens += report.tokens
        data = one.run.stage.data.train
        return {"start": start, "rate": tokens / seconds, "tokens": float(data.lengths.sum())}


def tokeniser_alone(folder: Path) -> float:
    """Seconds for all prompts and answers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.parent / "base").backend_tokenizer
    rows = [json.loads(line) for line in (folder / "data.jsonl").open(encoding="utf-8")]
    texts = [text for row in rows for text in (row["instruction"] + row["input"], row["output"])]
    started = time.perf_counter()
    for at in range(0, len(texts), 1000):
        tokenizer.encode_batch(texts[at : at + 1000], add_special_tokens=False)
    return time.perf_counter() - started


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
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    heads = f"{'first start':>12} {'tokeniser':>10} {'second start':>13} {'tok/s of a step':>16}"
    print(f"{'examples':>9} {'tokens':>12} {heads}")
    with tempfile.TemporaryDirectory() as temporary:
        build_base(Path(temporary) / "base", [" ".join(record.values()) for record in records], 2, 256)
        for count in asked.counts:
            folder = Path(temporary) / str(count)
            folder.mkdir()
            write_world(folder, count, records)
            first, alone, second = child("run", folder), child("tokeniser", folder)["seconds"], child("run", folder)
            starts = f"{first['start']:>10.1f} s {alone:>8.1f} s {second['start']:>11.1f} s"
            print(f"{count:>9,} {first['tokens']:>12,.0f} {starts} {second['rate']:>16,.0f}", flush=True)


if __name__ == "__main__":
    main()
