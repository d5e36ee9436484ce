"""Two ranks are interrupted while a server is silent to one of them: both give up, save the same step, and go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from distributed.runs import LONGEST, Started, changed, rows, start_forked
from helpers.http_stub import answering
from helpers.served_teacher import ServedTeacher
from helpers.tiers import representatives
from methods.distill.test_run import UNEQUAL, world

__all__ = ["world"]
# Where: number of the first request that is not answered, last step before it.
WAITS = {"step": (9, 2), "evaluation": (5, 1), "grpo": (3, 1), "ppo": (3, 1)}
HEEDS_NO_SERVER = "module.StopRequest.gives_up = lambda own, give_up: None"


class Silent:
    """A teacher and a grader, one of whose answers is held back.

    number: of the request, from 1 on. then: called before it is. goes_on: set to answer it after all.
    """

    def __init__(self, world: Path, number: int, then: Callable[[], None]):
        self._teacher, self._number, self._then = ServedTeacher(world / "teacher"), number, then
        self._count, self._lock, self.goes_on = 0, threading.Lock(), threading.Event()

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        examples = path == "/v1/completions" and len(body["prompt"]) > 2  # shorter ones probe
        if examples or path == "/":
            with self._lock:
                self._count += 1
                here = self._count == self._number
            if here:
                self._then()
                self.goes_on.wait(LONGEST)
        if path == "/":
            return 200, {"scores": [sum(letter in "aeiou" for letter in one) for one in body["responses"]]}
        return self._teacher.reply(path, body)


def config_of(world: Path, output: Path, where: str, address: str) -> Path:
    match where:
        case "grpo":
            own = {"stage": "grpo", "grpo": {"rewards": [address], "group": 2, "max_new_tokens": 4}}
        case "ppo":
            own = {"stage": "ppo", "ppo": {"reward": address, "max_new_tokens": 4}}
        case _:
            own = {"stage": "distill", "distill": {"teacher": address, "top": 8}}
    own |= {"eval_every": "1 steps"} if where == "evaluation" else {}
    config = {
        **own,
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(world / "asked.jsonl"), "eval": 4 if where == "evaluation" else "none", "max_length": 64},
        "batch": {"size": 4, "micro": 1},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "parallel": {"nproc": 2},
        "duration": "4 steps",
        "output": str(output),
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    return file


def told(output: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in rows(output)]


# An evaluation looks for a signal before each batch, so its twin is no further.
CASES = [*((where, True) for where in WAITS), ("step", False), ("grpo", False)]


@pytest.mark.parametrize(("where", "heeds"), representatives(CASES, ("grpo", True), ("step", False)))
def test_both_ranks_wait_no_more_and_go_on_bit_for_bit(world, tmp_path, where, heeds):
    """The twin waits for the answer, and is a step further."""

    def run(name: str, *more: str) -> tuple[int, str]:
        environment = {} if heeds else changed(tmp_path / "heedless", HEEDS_NO_SERVER, HEEDS_NO_SERVER)
        words = ["train", config_of(world, tmp_path / name, where, stub.address), *more]
        started.append(start_forked(words, tmp_path / name, environment))
        return started[-1].end()[:2]

    def interrupts() -> None:
        for rank in started[0].ranks().values():
            os.kill(rank.pid, signal.SIGINT)
        if not heeds:
            silent.goes_on.wait(0.5)
            silent.goes_on.set()

    started: list[Started] = []
    silent, steps = Silent(world, WAITS[where][0], interrupts), WAITS[where][1]
    with answering(silent.reply) as stub:
        code, said = run("cut")
        silent.goes_on.set()
        assert (code, "error" in said) == (75, False), said
        done = sum("loss" in line for line in told(tmp_path / "cut"))
        assert (done > steps) != heeds, said
        assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == [f"checkpoint-{done}"]
        if not heeds:
            return
        for name, more in (("cut", ["--resume"]), ("whole", [])):
            code, said = run(name, *more)
            assert code == 0, said
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    cut, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("cut", "whole"))
    assert all(cut[name].equal(whole[name]) for name in whole)
