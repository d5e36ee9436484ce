"""What all sides of `benchmarks/peers.py` train on: base, first adapter, config, and examples step by step.

    world = make_world(folder, asked)       # made once; the same words make the same world
    world.tokens                            # real tokens of each step

A folder holds a base and the worlds upon it. A world that is there already is taken as it is, and so is the reference,
surefoot's plain fp32 path on it: delete the folder where the project's code has changed what either should be.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput import build_base

from surefoot.planning.plainest import PLAINEST

SIZES = {"tiny": (4, 256, 8_000), "small": (12, 768, 32_000), "vocabulary": (12, 768, 128_000)}
LR = 2e-4
LENGTH = 512  # tokens of an example at most, and of every one in the equal league
PLAIN = ("precision=fp32", *(f"{key}={value}" for key, value in PLAINEST.items()))  # what is held to be right


@dataclass(frozen=True)
class World:
    """tokens, supervised: real ones and learned ones, by step."""

    folder: Path
    tokens: list[int]
    supervised: list[int]

    def reference(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """compute: takes the steps by the plain fp32 path, once in the life of this folder."""
        kept = self.folder / "reference.json"
        known = json.loads(kept.read_text()) if kept.is_file() else {}
        if "norms" not in known:  # of an older program
            known = compute()
            kept.write_text(json.dumps(known))
        return known


def make_world(folder: Path, asked: Namespace) -> World:
    """asked: data, adapter, league, size, batch and steps."""
    data = asked.data.read_bytes()
    fixed = asked.league == "equal"
    what = [asked.size, asked.adapter, "fixed" if fixed else "short", f"b{asked.batch}", f"s{asked.steps}"]
    own = folder / "-".join([*what, hashlib.sha256(data).hexdigest()[:8]])
    if not (own / "world.json").is_file():
        shutil.rmtree(own, ignore_errors=True)  # of a call that was broken off
        own.mkdir(parents=True)
        _write(own, _base(folder, asked.size, json.loads(data)), json.loads(data), asked, fixed)
    return World(folder=own, **json.loads((own / "world.json").read_text()))


def _base(folder: Path, size: str, records: list[dict[str, str]]) -> Path:
    base = folder / f"base-{size}"
    if not (base / "config.json").is_file():
        layers, hidden, vocabulary = SIZES[size]
        build_base(base, [" ".join(record.values()) for record in records], layers, hidden, vocabulary)
    return base


def _write(own: Path, base: Path, records: list[dict[str, str]], asked: Namespace, fixed: bool) -> None:
    from surefoot.config.load import load_config
    from surefoot.data.order import step_examples
    from surefoot.stages.trial import ready

    if fixed:
        words = " ".join(record["output"] for record in records).split()
        records = [{"text": " ".join(words[at : at + 600])} for at in range(0, len(words) - 600, 150)]
    (own / "data.json").write_text(json.dumps(records))
    (own / "base").symlink_to(base.resolve())
    adapter = "" if asked.adapter == "full" else f"adapter: {{kind: {asked.adapter}, rank: 32, alpha: 64}}\n"
    (own / "run.yaml").write_text(
        f"stage: {'pretrain' if fixed else 'sft'}\nmodel: {own / 'base'}\noutput: {own / 'run'}\n"
        f"data: {{train: {own / 'data.json'}, max_length: {LENGTH}{'' if fixed else ', template: alpaca'}}}\n"
        f"batch: {{size: {asked.batch}}}\n"
        f"optim: {{lr: {LR}, schedule: constant, warmup: 0.0}}\nduration: {asked.steps} steps\n{adapter}"
    )
    config = load_config(own / "run.yaml", PLAIN).config
    steps: list[list[dict[str, list[int]]]] = []
    with ready(config, 1) as one:
        if config.adapter is not None:
            one.setup.write_model(own / "adapter")
        data = one.run.stage.data
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
