"""Every method on two processes through the commands that people type: each step loses what one process loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.runs import rows, run, surefoot
from tiny import tiny_llama

# fp32 sums over ranks and shares are taken in another order, and the second step follows Adam's first, which divides
# each gradient by its own size. Measured for DPO: 5e-8.
LOSS_TOLERANCE = 1e-4
ENGINES = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3},
}
PAIRS = {
    "data": {"train": "WORLD/pairs.jsonl", "max_length": 64},
    "batch": {"size": 3, "micro": 1},
}  # one rank has a blank one
METHODS: dict[str, dict[str, Any]] = {
    "reward": {"stage": "reward", **PAIRS},
    "dpo": {"stage": "dpo", "alignment": {"reference": "cached"}, **PAIRS},
    "ppo": {
        "stage": "ppo",
        "data": {"train": "WORLD/prompts.jsonl", "max_length": 64},
        "batch": {"size": 4, "micro": 1},
        "ppo": {
            "reward": "WORLD/score.py:vowels",
            "max_new_tokens": 6,
            "unsup_coef": 1.0,
            "unsup_data": "WORLD/texts.jsonl",  # 5: the second step has one text for its 4 micro-batches
        },
    },
}
SCORE = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]
"""
QUICK = {("ppo", "fsdp2"), ("ppo", "zero3"), ("dpo", "zero2")}
MATRIX = [
    pytest.param(method, engine, marks=() if (method, engine) in QUICK else pytest.mark.slow)
    for method in METHODS
    for engine in ENGINES
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    tiny_llama(folder / "base")
    words = ("one", "two", "heron", "sky", "trout", "answer")
    asked = [{"prompt": f"Say {word} {number} times."} for number, word in enumerate(words)]
    pairs = [
        {**one, "chosen": " ".join([word] * (1 + number % 3)), "rejected": words[number - 1]}
        for number, (one, word) in enumerate(zip(asked, words, strict=True))
    ]
    texts = [{"text": f"The {word} is here."} for word in words[:5]]
    for name, records in (("prompts", asked), ("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "score.py").write_text(SCORE)
    return folder


def losses(world: Path, name: str, method: str, parallel: dict[str, Any], **changes: Any) -> list[float]:
    """Of both steps of a run."""
    output = world / name
    config = {
        "model": "WORLD/base",
        "adapter": {"kind": "lora", "rank": 4, "alpha": 8},
        "optim": {"lr": 3.0e-3},
        "precision": "fp32",
        "duration": "2 steps",
        "output": str(output),
        **({"parallel": parallel} if parallel else {}),
        **METHODS[method],
        **changes,
    }
    path = world / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config).replace("WORLD", str(world)))
    code, said = run(surefoot("train", path), world / f"{name}.txt", {"XDG_CACHE_HOME": str(world / f"{name}.cache")})
    assert code == 0, said
    return [row["loss"] for row in rows(output) if "loss" in row]


@pytest.fixture(scope="module")
def alone(world):
    known: dict[str, list[float]] = {}

    def found(method: str) -> list[float]:
        if method not in known:
            known[method] = losses(world, f"{method}-alone", method, {})
        return known[method]

    return found


@pytest.mark.parametrize(("method", "engine"), MATRIX)
def test_two_ranks_lose_what_one_loses(world, alone, method, engine):
    found = losses(world, f"{method}-{engine}", method, {**ENGINES[engine], "nproc": 2})
    assert len(found) == 2
    assert found == pytest.approx(alone(method), abs=LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_twin_another_order_of_examples_is_seen(world, alone, method):
    assert losses(world, f"{method}-other", method, {}, seed=7) != pytest.approx(alone(method), abs=LOSS_TOLERANCE)
