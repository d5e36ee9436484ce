"""Runs of every stage in which some steps have a NaN loss: ten steps per pass, every record once per pass."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from helpers.tiny_models import tiny_llama
from surefoot.report.flight import recent

STEPS = 7  # of the ten of a pass: three may be skipped
GUARD = {"max_consecutive": 2, "rollback": "on"}
SCORE = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]
"""
_DATA = {"sft": "answers", "pretrain": "texts", "reward": "pairs", "dpo": "pairs", "kto": "judged", "ppo": "prompts"}


def rollback_world(folder: Path) -> Path:
    tiny_llama(folder / "base", pad=True, attention_dropout=0.1)
    (folder / "score.py").write_text(SCORE)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _DATA.values()}
    for n in range(40):
        prompt, answer = f"Say sky {n} times.", " ".join(["sky"] * (1 + n % 4))
        rows["answers"].append({"instruction": prompt, "output": answer})
        rows["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": "heron"})
        rows["judged"].append({"prompt": prompt, "completion": answer, "label": n % 2 == 0})
        rows["prompts"].append({"prompt": prompt})
        rows["texts"].append({"text": f"The sky over the heron is {n} times blue."})
    for name, found in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    return folder


def write_config(world: Path, name: str, stage: str = "sft", adapter: str = "lora", **changes: Any) -> str:
    """Save after every second step; in stage ppo after every third, in the middle of a cycle of two."""
    config: dict[str, Any] = {
        "stage": stage,
        "model": {"path": str(world / "base"), "dropout": "own"},
        "data": {"train": str(world / f"{_DATA[stage]}.json"), "max_length": 64},
        "precision": "fp32",
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 3e-3},
        "duration": f"{STEPS} steps",
        "checkpoint": {"every": "3 steps" if stage == "ppo" else "2 steps", "keep": 2, "best": "none"},
        "guard": GUARD,
        "output": str(world / name),
    }
    if adapter != "full":
        config["adapter"] = {"kind": adapter, "rank": 2, "alpha": 4, "dropout": 0.1}
    if stage == "ppo":
        score = f"{world / 'score.py'}:vowels"
        config["ppo"] = {"reward": score, "max_new_tokens": 4, "rollout_batches": 2, "ema": 0.9, "kl_target": 0.5}
    path = world / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return str(path)


def examples_by_step(run: Path) -> dict[int, list[Any]]:
    """Return the examples of each step, from flight.jsonl."""
    return {line["step"]: line["examples"] for line in recent(run)}


def one_of_each(clean: dict[int, list[Any]], steps: Iterable[int]) -> Collection[Any]:
    """Return one data record of each of these steps."""
    return {clean[step][-1] for step in steps}
