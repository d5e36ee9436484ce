"""What all sides of `benchmarks/peers.py` train on: base, first adapter, config, and examples step by step.

    world = make_world(folder, asked)       # made once; the same words make the same world
    world.tokens                            # real tokens of each step

A folder holds a base and the worlds upon it. A world that is there already is taken as it is, and so is the reference,
surefoot's plain fp32 path on it: delete the folder where the project's code has changed what either should be. It is
made in a process of its own: what that leaves on a GPU would be missing for the sides.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bases import SIZES, build_base
from fresh import told_by
from surefoot.planning.fast_paths import PLAINEST

LR = 2e-4
LENGTH = 512  # tokens of an example at most, and of every one in the equal league, unless --length says otherwise
RANK = 32
TEMPLATE = "alpaca"
_FIXED_WORDS = 600  # more than LENGTH tokens
_ENDS = 2  # tokens that stage pretrain puts around a text
PLAINEST_WORDS = tuple(f"{key}={value}" for key, value in PLAINEST.items())
PLAIN = ("precision=fp32", *PLAINEST_WORDS)  # what is held to be right


@dataclass(frozen=True)
class World:
    """tokens, supervised: real ones and learned ones, by step."""

    folder: Path
    tokens: list[int]
    supervised: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        steps = json.loads((self.folder / "examples.json").read_text())
        return max(len(row["input_ids"]) for step in steps for row in step)

    def reference(self, steps: int, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """compute: takes so many steps by the plain fp32 path, once in the life of this folder."""
        kept = self.folder / "reference.json"
        known = json.loads(kept.read_text()) if kept.is_file() else {}
        if len(known.get("norms", ())) < steps:  # of an older program, or of fewer steps
            known = compute()
            kept.write_text(json.dumps(known))
        return known


def make_world(folder: Path, asked: Namespace) -> World:
    """asked: data, template, adapter, rank, league, size, length, batch, steps and device."""
    own = folder / name_of(asked)
    if not (own / "world.json").is_file():
        shutil.rmtree(own, ignore_errors=True)  # of a call that was broken off
        own.mkdir(parents=True)
        words = {key: str(value) if isinstance(value, Path) else value for key, value in vars(asked).items()}
        told_by([sys.executable, __file__, str(folder), json.dumps(words)])
    return World(folder=own, **json.loads((own / "world.json").read_text()))


def name_of(asked: Namespace) -> str:
    """Of the world's folder: what is usual is not said."""
    kind = "equal" if is_fixed(asked) else "short"
    unusual = [
        f"{letter}{value}"
        for letter, value, usual in (("l", asked.length, LENGTH), ("r", asked.rank, RANK))
        if value != usual
    ]
    template = [] if asked.template == TEMPLATE or is_fixed(asked) else [asked.template]
    data = hashlib.sha256(asked.data.read_bytes()).hexdigest()[:8]
    counts = [f"b{asked.batch}", f"s{asked.steps}"]
    return "-".join([asked.size, asked.adapter, kind, *unusual, *template, *counts, data])


def is_fixed(asked: Namespace) -> bool:
    """Whether every example has the same length and is learned whole."""
    return asked.league == "equal"


def _base(folder: Path, asked: Namespace, records: list[dict[str, Any]]) -> Path:
    base = folder / f"base-{asked.size}"
    if not (base / "config.json").is_file():
        started = folder / f"{base.name}-unfinished"
        shutil.rmtree(started, ignore_errors=True)
        build_base(started, [" ".join(texts_of(record)) for record in records], SIZES[asked.size], asked.device)
        started.rename(base)
    return base


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a record, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_of(one)


def world_records(asked: Namespace, base: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the world trains on. base: folder of the tokenizer. records: of --data; in the equal league the answers of
    alpaca records become texts of `asked.length` tokens each, with those of beginning and end."""
    if not is_fixed(asked):
        return records
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    words = " ".join(record["output"] for record in records).split()
    count = _FIXED_WORDS * asked.length // LENGTH
    long = (" ".join(words[at : at + count]) for at in range(0, len(words) - count, _FIXED_WORDS // 4))
    cut = [_cut(text, asked.length - _ENDS, tokenizer) for text in long]
    return [{"text": text} for text in cut if text is not None]


def _cut(text: str, tokens: int, tokenizer: Any) -> str | None:
    """The beginning of a text, of so many tokens; None where it is another number once it stands alone."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(encoded["input_ids"]) < tokens:
        return None
    found = text[: encoded["offset_mapping"][tokens - 1][1]]
    return found if len(tokenizer(found, add_special_tokens=False)["input_ids"]) == tokens else None


def config_text(own: Path, asked: Namespace) -> str:
    """run.yaml of the world in the folder `own`."""
    fixed = is_fixed(asked)
    alpha = 2 * asked.rank
    adapter = (
        "" if asked.adapter == "full" else f"adapter: {{kind: {asked.adapter}, rank: {asked.rank}, alpha: {alpha}}}\n"
    )
    return (
        f"stage: {'pretrain' if fixed else 'sft'}\nmodel: {own / 'base'}\noutput: {own / 'run'}\n"
        f"data: {{train: {own / 'data.json'}, max_length: {asked.length}"
        f"{'' if fixed else f', template: {asked.template}'}}}\n"
        f"batch: {{size: {asked.batch}}}\n"
        f"optim: {{lr: {LR}, schedule: constant, warmup: 0.0}}\nduration: {asked.steps} steps\n{adapter}"
    )


def _write(own: Path, base: Path, records: list[dict[str, Any]], asked: Namespace) -> None:
    from surefoot.config.load import load_config
    from surefoot.data.batching.order import step_examples
    from surefoot.runs.trial import ready

    (own / "data.json").write_text(json.dumps(world_records(asked, base, records)))
    (own / "base").symlink_to(base.resolve())
    (own / "run.yaml").write_text(config_text(own, asked))
    # A base that is held in 16 bits is opened so: PEFT then draws the adapter as surefoot's own run will.
    config = load_config(own / "run.yaml", PLAINEST_WORDS if SIZES[asked.size].large else PLAIN).config
    steps: list[list[dict[str, list[int]]]] = []
    with ready(config, 1) as one:
        if config.adapter is not None:
            one.loaded.write_weights(own / "adapter")
        data = one.run.task.data
        for step in range(asked.steps):
            _, indices = step_examples(config.seed, step, data.mixture, asked.batch)
            steps.append([])
            for example in (data.train[int(index)] for index in indices):
                labels = example.ids.copy()
                labels[~example.supervised] = -100
                steps[-1].append({"input_ids": example.ids.tolist(), "labels": labels.tolist()})
    (own / "examples.json").write_text(json.dumps(steps))
    counts = {
        "tokens": [sum(len(row["input_ids"]) for row in step) for step in steps],
        "supervised": [sum(label != -100 for row in step for label in row["labels"]) for step in steps],
    }
    (own / "world.json").write_text(json.dumps(counts))


def main() -> None:
    folder, asked = Path(sys.argv[1]), Namespace(**json.loads(sys.argv[2]))
    asked.data = Path(asked.data)
    records = json.loads(asked.data.read_text(encoding="utf-8"))
    _write(folder / name_of(asked), _base(folder, asked, records), records, asked)
    print(json.dumps("made"))


if __name__ == "__main__":
    main()
