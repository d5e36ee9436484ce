"""From a JSON list of instructions to tokenized examples on the disk, beside `datasets.map`: rows a second, and memory.

    python benchmarks/preparing.py [--counts 20000 200000 1000000] [--peer ENV/bin/python]

--peer: a Python with `datasets` and `transformers`; without it surefoot alone is measured. Each side reads the same
file in a fresh process with a cache of its own and tokenizes prompt and answer of each record once, in batches; the
peer in one process. surefoot also hashes, audits and proves what it wrote. Seconds are of the clock and of the
processor, all threads together. The peak is that of the process, mapped files included; what stood there after the
imports is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_LENGTH = 512
PROMPT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def here(file: Path, base: Path, cache: Path) -> dict[str, float]:
    from transformers import PreTrainedTokenizerFast

    from surefoot.data.prepare import prepare_data
    from surefoot.data.sources.resolve import SourceSpec

    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    with measured() as found:
        data = prepare_data(
            [SourceSpec(str(file))],
            None,
            template="alpaca",
            template_asked=True,
            tokenizer=tokenizer,
            bos_id=tokenizer.bos_token_id,
            pad_id=tokenizer.pad_token_id,
            stop_ids=(tokenizer.eos_token_id,),
            max_length=MAX_LENGTH,
            max_samples=None,
            train_on="responses",
            seed=0,
            cache=cache,
        )
    return {**found, "rows": float(len(data.train))}


def peer(file: Path, base: Path, cache: Path) -> dict[str, float]:
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def tokenized(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        fields = zip(batch["instruction"], batch["input"], strict=True)
        prompts = [PROMPT.format(instruction=instruction, input=given) for instruction, given in fields]
        asked, answered = (
            tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (prompts, batch["output"])
        )
        rows = [([bos, *left, *right, eos], len(left) + 1) for left, right in zip(asked, answered, strict=True)]
        ids = [row[:MAX_LENGTH] for row, _ in rows]
        masks = [
            [0] * min(begin, len(row)) + [1] * (len(row) - begin) for row, (_, begin) in zip(ids, rows, strict=True)
        ]
        return {"input_ids": ids, "completion_mask": masks}

    with measured() as found:
        data: Any = load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
        data = data.map(tokenized, batched=True, remove_columns=data.column_names)
    return {**found, "rows": float(len(data))}


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    found = {"imports": peak()}
    processor, wall = time.process_time(), time.perf_counter()
    yield found
    found |= {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall, "peak": peak()}


def peak() -> float:
    """MiB of this process, as Linux counts them."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def main() -> None:
    if "--child" in sys.argv:
        side, file, base = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
        with tempfile.TemporaryDirectory(dir=file.parent) as cache:
            print(json.dumps({"here": here, "peer": peer}[side](file, base, Path(cache))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--counts", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--peer", help="A Python that has `datasets`.")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    beside(json.loads(asked.data.read_text(encoding="utf-8")), asked.counts, asked.peer)


def beside(records: list[dict], counts: list[int], other: str | None) -> None:
    from bases import Shape, write_config
    from fresh import told_by
    from growth import numbered

    sides = {"here": sys.executable, **({"peer": other} if other else {})}
    print(
        f"{'rows':>9} {'side':>5} {'seconds':>9} {'processor':>10} {'rows/s':>8} {'peak':>9} {'imports':>9} {'load':>5}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        base, file = Path(temporary) / "base", Path(temporary) / "data.json"
        write_config(base, [" ".join(record.values()) for record in records], Shape(2, 256))
        for count in counts:
            with file.open("w", encoding="utf-8") as written:
                for number in range(count):
                    record = json.dumps(numbered(records[number % len(records)], number))
                    written.write(f"{'[' if number == 0 else ','}\n{record}")
                written.write("\n]\n")
            for side, python in sides.items():
                found = told_by([python, __file__, "--child", side, str(file), str(base)])
                print(
                    f"{count:>9,} {side:>5} {found['wall']:>9.1f} {found['processor']:>10.1f} "
                    f"{found['rows'] / found['wall']:>8,.0f} {found['peak']:>5.0f} MiB {found['imports']:>5.0f} MiB "
                    f"{os.getloadavg()[0]:>5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
