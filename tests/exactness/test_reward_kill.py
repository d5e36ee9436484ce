"""Kill -9 in a reward run, run the same command again, and the end is the same: weights, value head, moments."""

from __future__ import annotations

import json

import pytest
import yaml

from helpers.fork_server import ForkServer
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.models.value_head import VALUE_HEAD_FILE
from surefoot.report.verification import compare_folders

KILLED = -9


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_llama(folder / "base", attention_dropout=0.1)
    rows = [
        {"prompt": f"Say {bird}.", "chosen": f"{bird} {n}", "rejected": "no " * n}
        for bird in ("heron", "moth", "fern")
        for n in (1, 2, 4)
    ]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def write_config(world, name: str, adapter: dict | None, loss: str) -> str:
    config = {
        "stage": "reward",
        "model": {"path": str(world / "base"), "dropout": "own"},
        **({"adapter": adapter} if adapter else {}),
        "data": {"train": str(world / "pairs.jsonl"), "eval": 2, "max_length": 96, "template": "plain"},
        "reward": {"loss": loss, "center": 0.01},
        "batch": {"size": 3, "micro": 2},
        "optim": {"lr": 1e-2, "warmup": "2 steps"},
        "duration": "8 steps",
        "eval_every": "3 steps",
        "checkpoint": {"every": "2 steps", "keep": 2},
        "output": str(world / name),
    }
    path = world / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}


@pytest.mark.parametrize(
    ("adapter", "loss"), representatives([(LORA, "last"), (None, "divergence")], (None, "divergence"))
)
def test_killed_and_resumed_equals_uninterrupted(world, adapter, loss):
    straight, broken = (write_config(world, f"{name}-{loss}", adapter, loss) for name in ("straight", "broken"))
    log = world / f"{loss}.txt"
    with ForkServer() as server:
        assert server.run(["train", straight], log) == 0, log.read_text()
        for kill in ({"at": "step", "n": 2}, {"at": "sync", "n": 9}, {"at": "log", "n": 6}):
            assert server.run(["train", broken, "--resume"], log, kill) == KILLED, log.read_text()
        assert server.run(["train", broken, "--resume"], log) == 0, log.read_text()
    assert compare_folders(world / f"straight-{loss}", world / f"broken-{loss}") == []
    head = world / f"broken-{loss}" / "checkpoint-8" / VALUE_HEAD_FILE  # twin: one flipped bit of the head is seen
    data = bytearray(head.read_bytes())
    data[-1] ^= 1
    head.write_bytes(bytes(data))
    assert compare_folders(world / f"straight-{loss}", world / f"broken-{loss}") != []
