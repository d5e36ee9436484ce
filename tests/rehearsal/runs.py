"""Small runs of every method on the pretend GPU, and where they wait."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import surefoot
from helpers import pretend_gpu
from helpers.tiny_models import tiny_llama
from surefoot.training import loop

ON_THE_PRETEND_GPU = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not pretend_gpu.is_here(), reason="runs on the pretend GPU: make rehearsal"),
]
LORA = {"kind": "lora", "rank": 4}
BF16, FP32 = {"precision": "bf16"}, {"precision": "fp32"}
OFFLOADED = {"parallel": {"offload": "optimizer"}}
# One pass of each micro-batch reads where its learned tokens stand, and transformers whether a row is padded.
PER_PASS = {("aten::nonzero", "methods/losses/sft.py:supervised_places"), ("item", "models/forward.py:hidden_states")}
NARROWED = ("item", "models/forward.py:narrowed_logits")  # transformers' look at padding, again
BESIDES = {
    "dora": {("copy to the host", "kernels/dora.py:factors_of")},  # once a step: the factors of all layers
    "dpo-full": {NARROWED},
    "offloaded": {
        ("copy to the host", "training/engine/base.py:clip"),  # the step is taken there
        ("synchronize", "training/engine/offloaded.py:wait_for_room"),  # more under way than the largest gradient
        ("copy to the device", "training/engine/offloaded.py:<dictcomp>"),  # the norm of each group, for the guard
        ("copy to the device", "training/optimizer_state.py:look_at_moments"),  # whether they are finite
    },
    "ppo": {NARROWED, *((why, "methods/losses/ppo.py:at_places") for why in ("aten::nonzero", "aten::index"))},
    "grpo": {NARROWED, ("aten::nonzero", "methods/losses/grpo.py:answers_of")},
}
STEPS = 3
THE_ONE = ("copy to the host", "training/step.py:_to_host")


def lengths(prompts, responses):
    return [float(len(text)) for text in responses]


def make_world(folder: Path) -> Path:
    """A tiny model, and data for each method."""
    tiny_llama(folder / "base")
    numbers = range(1, 9)
    of_stage = {
        "sft": [{"instruction": f"Say {n}.", "output": "heron " * n} for n in numbers],
        "pretrain": [{"text": "heron " * (4 + n)} for n in numbers],
        "pairs": [{"prompt": f"Say {n}.", "chosen": "a e i", "rejected": "b c d " * n} for n in numbers],
        "kto": [{"prompt": f"Say {n}.", "completion": "a e i" * n, "label": n % 2 == 0} for n in numbers],
        "prompts": [{"prompt": f"Say number {n}.", "answer": str(n)} for n in numbers],
    }
    for name, rows in of_stage.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(
    world: Path, name: str, stage: str = "sft", data: str = "sft", packing: str = "", **changes: Any
) -> dict[str, Any]:
    config = {
        "stage": stage,
        "model": str(world / "base"),
        "adapter": LORA,
        "data": {"train": str(world / f"{data}.jsonl"), "max_length": 128, **({"packing": packing} if packing else {})},
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "duration": "3 steps",
        "output": str(world / name),
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def train(config: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    """The rows of the steps; the run was on the GPU."""
    surefoot.train(config, stream=io.StringIO(), **how)
    run = Path(config["output"])
    assert json.loads((run / "plan.json").read_text())["plan"]["device"]["value"] == "cuda"
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


CASES = {
    "lora": BF16,
    "dora": BF16 | {"adapter": {"kind": "dora", "rank": 4, "dropout": 0.1}},
    "full": BF16 | {"adapter": None},
    "full-fp32": FP32 | {"adapter": None},
    "lora-fp16": {"precision": "fp16"},
    "packed": BF16 | {"packing": "on"},
    "checkpointed": BF16 | {"gradient_checkpointing": True},
    "bos": BF16 | {"adapter": None, "bos": {"prepend": "on", "scale": 0.5}},
    "pretrain": BF16 | {"stage": "pretrain", "records": "pretrain", "adapter": None},
    "reward": BF16 | {"stage": "reward", "records": "pairs"},
    "dpo": BF16 | {"stage": "dpo", "records": "pairs"},
    "dpo-full": BF16 | {"stage": "dpo", "records": "pairs", "adapter": None},
    "kto": BF16 | {"stage": "kto", "records": "kto"},
    "ppo": BF16 | {"stage": "ppo", "records": "prompts", "ppo": {"max_new_tokens": 4}},
    "grpo": BF16 | {"stage": "grpo", "records": "prompts", "grpo": {"max_new_tokens": 4, "group": 2, "kl": 0.1}},
    "offloaded": BF16 | OFFLOADED | {"adapter": None},
    "muon": BF16 | {"adapter": None, "optim": {"name": "muon", "lr": 1e-3}},
}


class Died(Exception):
    pass


def dying(patch: pytest.MonkeyPatch, after: int) -> None:
    """The run ends in the step after these, as by a kill."""
    real, taken = loop.train_step, []

    def train_step(*given: Any, **named: Any) -> Any:
        if len(taken) == after:
            raise Died
        taken.append(1)
        return real(*given, **named)

    patch.setattr(loop, "train_step", train_step)


def started(world: Path, case: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, further arguments of surefoot.train)"""
    changes = dict(CASES[case])
    data = changes.pop("records", "sft")
    config = config_of(world, f"{case}-{name}", changes.pop("stage", "sft"), data, **changes)
    return config, {"reward": lengths} if case in ("ppo", "grpo") else {}


def waits_of_a_step(config: dict[str, Any], **how: Any) -> tuple[Counter[tuple[str, str | None]], list[dict[str, Any]]]:
    """Where the last step of a run waited, as (why, place), but for the one place that a step is meant to have; and the
    run's rows."""
    from pretend_cuda import Waits

    with Waits() as waits:
        rows = train(config, **how)
    last = Counter({(why, place): n for (why, place, step), n in waits.seen.items() if step == STEPS})
    assert last.pop(THE_ONE) == 1
    return last, rows
