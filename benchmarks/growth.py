"""How a run grows with its data, and with the depth and the width of its model.

    python benchmarks/growth.py [--counts 1000 10000 100000] [--rounds 3]
    python benchmarks/growth.py --models 2x256 4x256 8x256 4x512 4x1024 [--rounds 3]
    python benchmarks/growth.py --tokenizing [--counts 10000] [--rounds 3]

Data: start, second start, time of a token in the steps, and memory. Models: what a token needs by arithmetic beside
what it takes. Everything is measured in fresh processes on one thread; after the first starts the rounds go through all
sizes in turn, and medians are shown. Tokenizing: instructions, dialogues and pairs from the file to the audited cache,
beside the fast tokenizer alone over the same laid-out texts, in the same batches and each text of a batch once: nobody
can start faster the first time. In turn, processor time on one thread and wall clock on all cores; the ratio is that of
the fastest rounds, which other programs stretched least. All other times are processor time without the imports, so
that other programs on the machine stretch them little. What a start does however many examples there are: plan, load
the model, and hold the fast paths against the plain model on real micro-batches. Memory is the peak above what stood
there after the imports, and what of that are pages of the tokenized files, which the system takes back when it needs
them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bases import Shape, build_base
from fresh import told_by

STEPS = 20
WARM_UP = 2


SAMPLES = {
    "instructions": "alpaca_en_demo.json",
    "dialogues": "sharegpt_multiturn_200.json",
    "pairs": "dpo_en_demo.json",
}
# What is tokenized: template, kind and max_length.
LAID_OUT = {
    "instructions": ("alpaca", "answers", 512),
    "dialogues": ("vicuna", "answers", 2048),
    "pairs": ("vicuna", "pairs", 2048),
}


def write_world(folder: Path, count: int, records: list[dict]) -> None:
    write_records(folder / "data.jsonl", count, records)
    (folder / "run.yaml").write_text(
        f"stage: sft\nmodel: {folder.parent / 'base'}\noutput: {folder / 'run'}\n"
        f"data: {{train: {folder / 'data.jsonl'}, max_length: 512, template: alpaca}}\nbatch: {{size: 8}}\n"
        f"adapter: {{kind: lora, rank: 8}}\nduration: {STEPS} steps\nprecision: fp32\nattention: sdpa\n"
    )


def write_records(path: Path, count: int, records: list[dict]) -> None:
    """count records: the given ones over and over, numbered, so that no two are the same."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps(numbered(records[number % len(records)], number)) + "\n")


def numbered(record: dict, number: int) -> dict:
    """Its first words are the number."""
    if "instruction" in record:
        return {**record, "instruction": f"{number}. {record['instruction']}"}
    first, *others = record["conversations"]
    return {**record, "conversations": [{**first, "value": f"{number}. {first['value']}"}, *others]}


def measure(folder: Path) -> dict[str, float]:
    """In this process: seconds to the first step, milliseconds of a token in the steps, GFLOP that a token needs, MiB
    at the peak and of mapped files above those after the imports."""
    import peft  # noqa: F401  imports are not counted
    import transformers  # noqa: F401

    from surefoot.config.load import load_config
    from surefoot.runs.profiling import arithmetic_of, step_work
    from surefoot.runs.trial import ready

    config = load_config(folder / "run.yaml").config
    held, mapped = resident("VmHWM"), resident("RssFile")
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
        data = one.run.task.data.train
        return {
            "start": start,
            "ms": 1000 * seconds / tokens,
            "tokens": float(data.lengths.sum()),
            "needed": needed / tokens / 1e9,
            "peak": resident("VmHWM") - held,
            "mapped": resident("RssFile") - mapped,
        }


def resident(name: str) -> float:
    """MiB of this process, as Linux counts them."""
    return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def tokenize(folder: Path) -> dict[str, float]:
    """Seconds from the file to the audited cache."""
    from transformers import PreTrainedTokenizerFast

    from surefoot.data.prepare import prepare_data
    from surefoot.data.sources.resolve import SourceSpec

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.parent / "base")
    template, kind, max_length = LAID_OUT[folder.name]
    with tempfile.TemporaryDirectory() as cache, timed() as seconds:
        data = prepare_data(
            [SourceSpec(str(folder / "data.jsonl"))],
            None,
            template=template,
            template_asked=True,
            tokenizer=tokenizer,
            bos_id=tokenizer.bos_token_id,
            pad_id=tokenizer.pad_token_id,
            stop_ids=(tokenizer.eos_token_id,),
            max_length=max_length,
            max_samples=None,
            train_on="responses",
            seed=0,
            cache=Path(cache),
            kind=kind,
        )
    return {**seconds, "tokens": float(data.train.lengths.sum())}


def tokenizer_alone(folder: Path) -> dict[str, float]:
    """Seconds of the fast tokenizer over the texts that `tokenize` hands it, without the few that it sees again."""
    from transformers import PreTrainedTokenizerFast

    from surefoot.data.tokenize.segments import TextEncoder

    batches: list[tuple[bool, list[str]]] = []
    encode = TextEncoder.encode

    def noted(self, pieces):
        batches.extend(
            (literal, list(dict.fromkeys(piece.text for piece in pieces if piece.literal == literal)))
            for literal in (False, True)
        )
        return encode(self, pieces)

    TextEncoder.encode = noted
    tokenize(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.parent / "base").backend_tokenizer
    with timed() as seconds:
        for literal, texts in batches:
            tokenizer.encode_special_tokens = literal
            tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return seconds


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds of the block, by the processor and by the clock."""
    seconds: dict[str, float] = {}
    processor, wall = time.process_time(), time.perf_counter()
    yield seconds
    seconds |= {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}


CHILDREN = {"run": measure, "tokenize": tokenize, "alone": tokenizer_alone}


def child(what: str, folder: Path, *, threads: int = 1) -> dict[str, float]:
    """threads: of the tokenizer."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "RAYON_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": "1",
    }
    return told_by([sys.executable, __file__, "--child", what, str(folder)], environment)


def main() -> None:
    if "--child" in sys.argv:
        what, folder = sys.argv[2], Path(sys.argv[3])
        print(json.dumps(CHILDREN[what](folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", metavar="LAYERSxWIDTH", help="Grow the model in place of the data.")
    parser.add_argument("--tokenizing", action="store_true", help="Beside the fast tokenizer alone; uses --counts.")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        if asked.tokenizing:
            beside_tokenizer(Path(temporary), asked.data.parent, asked.counts, asked.rounds)
        elif asked.models:
            grow_model(Path(temporary), records, asked.models, asked.rounds)
        else:
            grow_data(Path(temporary), records, asked.counts, asked.rounds)


def medians(folders: list[Path], rounds: int) -> list[dict[str, float]]:
    """Of each world, over rounds that go through all of them in turn."""
    seen = [[child("run", folder) for folder in folders] for _ in range(rounds)]
    return [{name: statistics.median(one[name] for one in own) for name in own[0]} for own in zip(*seen, strict=True)]


def grow_data(folder: Path, records: list[dict], counts: list[int], rounds: int) -> None:
    build_base(folder / "base", [" ".join(record.values()) for record in records], Shape(2, 256))
    print(f"{'examples':>9} {'tokens':>12} {'first start':>12}", flush=True)
    worlds = []
    for count in counts:
        worlds.append(folder / str(count))
        worlds[-1].mkdir()
        write_world(worlds[-1], count, records)
        first = child("run", worlds[-1])
        print(f"{count:>9,} {first['tokens']:>12,.0f} {first['start']:>10.1f} s", flush=True)
    print(f"{'examples':>9} {'second start':>13} {'ms a token':>11} {'peak':>10} {'mapped':>10}")
    for count, one in zip(counts, medians(worlds, rounds), strict=True):
        memory = f"{one['peak']:>6.0f} MiB {one['mapped']:>6.0f} MiB"
        print(f"{count:>9,} {one['start']:>11.2f} s {one['ms']:>11.4f} {memory}", flush=True)


def beside_tokenizer(folder: Path, data: Path, counts: list[int], rounds: int) -> None:
    """data: a folder with the files of SAMPLES."""
    records = {name: json.loads((data / file).read_text(encoding="utf-8")) for name, file in SAMPLES.items()}
    build_base(folder / "base", [" ".join(record.values()) for record in records["instructions"]], Shape(2, 256))
    cores = len(os.sched_getaffinity(0))
    print("here and alone: processor seconds on one thread, and their ratio; seconds of the clock on all cores")
    print(f"{'':>12} {'records':>8} {'tokens':>11} {'here':>7} {'alone':>7} {'ratio':>6} {cores:>3} cores: here  alone")
    for count in counts:
        for name in SAMPLES:
            world = folder / name
            world.mkdir(exist_ok=True)
            write_records(world / "data.jsonl", count, records[name])
            turns = [(what, threads) for threads in (1, cores) for what in ("tokenize", "alone")]
            seen = [[child(what, world, threads=threads) for what, threads in turns] for _ in range(rounds)]
            here, alone = (min(turn[place]["processor"] for turn in seen) for place in (0, 1))
            quick, bare = (min(turn[place]["wall"] for turn in seen) for place in (2, 3))
            told = (
                f"{name:>12} {count:>8,} {seen[0][0]['tokens']:>11,.0f} {here:>7.2f} {alone:>7.2f} {here / alone:>6.2f}"
            )
            print(f"{told} {quick:>15.2f} {bare:>6.2f}", flush=True)


def grow_model(folder: Path, records: list[dict], models: list[str], rounds: int) -> None:
    texts = [" ".join(record.values()) for record in records]
    worlds = []
    for model in models:
        layers, width = map(int, model.split("x"))
        worlds.append(folder / model / "data")
        worlds[-1].mkdir(parents=True)
        build_base(folder / model / "base", texts, Shape(layers, width))
        write_world(worlds[-1], len(records), records)
    print(f"{'model':>9} {'GFLOP a token':>14} {'ms a token':>11} {'GFLOP/s':>9}", flush=True)
    for model, one in zip(models, medians(worlds, rounds), strict=True):
        print(f"{model:>9} {one['needed']:>14.4f} {one['ms']:>11.3f} {1000 * one['needed'] / one['ms']:>9.1f}")


if __name__ == "__main__":
    main()
