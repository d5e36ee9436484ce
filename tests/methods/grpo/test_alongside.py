"""Rollouts that a server draws while the trainer trains: that they do, and that it changes no bit."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.killed import Killed, killed
from helpers.tiers import representatives
from helpers.vllm_answers import completion
from methods.grpo.test_run import config_of, rows_of, run, vowels, world
from surefoot.methods.grpo.alongside import Alongside
from surefoot.methods.rollouts import RolloutEngine
from surefoot.training import step as training_step

__all__ = ["world"]
STUCK = 60.0  # seconds after which a wait for the other side has failed


class Drawing:
    """A server whose answers depend on the adapter that it was told, and on the seed. It tells the base's
    log-probabilities, which are the policy's before the first update."""

    def __init__(self, world: Path):
        self.base = AutoModelForCausalLM.from_pretrained(world / "base").eval()
        self.adapters: dict[str, int] = {}
        self.before_an_answer = lambda: None

    def reply(self, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if path == "/v1/load_lora_adapter":
            content = (Path(body["lora_path"]) / "adapter_model.safetensors").read_bytes()
            self.adapters[body["lora_name"]] = int(hashlib.sha256(content).hexdigest()[:6], 16)
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path != "/inference/v1/generate":
            return 200, "Success"
        prompt, asked = body["token_ids"], body["sampling_params"]
        if asked["temperature"] != 2.0:
            self.before_an_answer()
        mixed = asked["seed"] ^ self.adapters.get(body["model"], 0)
        ids = [40 + (mixed >> place) % 97 for place in range(asked["max_tokens"])]
        with torch.no_grad():
            logp = self.base(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        told = [float(row[token]) for row, token in zip(logp, ids, strict=True)]
        return 200, completion(ids, told, model=body["model"])


@contextmanager
def drawing(world: Path):
    server = Drawing(world)
    with answering(server.reply) as stub:
        yield stub.address, server


def served(world: Path, output: Path, address: str, ahead: int = 1, **grpo) -> dict:
    config = config_of(
        world, output, ahead=ahead, engine="vllm", vllm_url=address, mismatch="caution", mismatch_bound=100.0, **grpo
    )
    return config | {"duration": "6 steps", "optim": {"lr": 0.05}, "checkpoint": {"every": "6 steps"}}


def results(config: dict) -> tuple[list[dict], bytes, dict[str, torch.Tensor]]:
    folder = Path(config["output"])
    return rows_of(config), (folder / "answers.jsonl").read_bytes(), load_file(folder / "adapter_model.safetensors")


def equal(one, other) -> bool:
    return one[:2] == other[:2] and all(one[2][name].equal(other[2][name]) for name in one[2])


def waits_for_answers(monkeypatch) -> None:
    real = RolloutEngine.__init__
    monkeypatch.setattr(
        RolloutEngine, "__init__", lambda own, rollouts, follow, alongside=False: real(own, rollouts, follow, False)
    )


MORE = ({}, {"redraw": 2, "epochs": 2, "rollout_batches": 2, "kl": 0.1, "ahead": 2})


@pytest.mark.parametrize("more", representatives(MORE, MORE[1]))
def test_with_and_without_waiting_every_bit_is_the_same(world, tmp_path, monkeypatch, more):
    found = []
    for name in ("alongside", "waiting"):
        with drawing(world) as (address, _), monkeypatch.context() as patched:
            if name == "waiting":
                waits_for_answers(patched)
            config = served(world, tmp_path / name, address, **({"ahead": 1} | more))
            config["data"]["eval"] = str(world / "prompts.jsonl")
            config |= {"eval_every": "2 steps", "checkpoint": {"every": "3 steps"}}
            run(config)
            found.append(results(config))
    assert equal(*found)
    ratios = [row["ratio"] for row in found[0][0]]
    assert any(abs(ratio - 1) > 1e-4 for ratio in ratios[1:])  # the policy moves between a draw and its update


def test_twin_log_probabilities_by_the_weights_after_the_update_are_seen(world, tmp_path, monkeypatch):
    """The answers drawn beside step 1 are by the base, and the weights after it are not."""
    monkeypatch.setattr(Alongside, "_exchange", lambda own: None)
    with drawing(world) as (address, _), raises_fault("SF-PLAN-BROKEN", "grpo"):
        run(served(world, tmp_path / "run", address))


def test_the_answers_of_the_next_rollout_are_drawn_during_the_update(world, tmp_path, monkeypatch):
    """The server answers about rollout n + 1 when update n has begun, and the update goes on when it is asked."""
    updates, asked = threading.Event(), threading.Event()
    real = training_step.accumulate_gradients
    meetings = []

    def waits_for_a_question(*args, **how):
        if len(meetings) < 5:  # the last rollout of the run is asked for before update 5
            updates.set()
            meetings.append(asked.wait(STUCK))
            asked.clear()
        return real(*args, **how)

    def waits_for_an_update():
        nonlocal first
        with lock:
            first += 1
            alone = first <= 8  # rollout 0, without which nothing can be trained on
            begins = first % 8 == 1
        if not alone:
            if begins:
                asked.set()
            assert updates.wait(STUCK)

    first, lock = 0, threading.Lock()
    monkeypatch.setattr(training_step, "accumulate_gradients", waits_for_a_question)
    with drawing(world) as (address, server):
        server.before_an_answer = waits_for_an_update
        run(served(world, tmp_path / "run", address))
    assert meetings == [True] * 5


@pytest.mark.parametrize("every", representatives([2, 9], 2))
def test_killed_while_answers_are_drawn_it_goes_on_bit_for_bit(world, tmp_path, every):
    found = []
    for name in ("whole", "cut"):
        with drawing(world) as (address, _):
            config = served(world, tmp_path / name, address) | {"checkpoint": {"every": f"{every} steps", "keep": 9}}
            if name == "cut":
                with killed(training_step, "accumulate_gradients", 4):
                    run(config)
            run(config, vowels, **({"resume": True} if name == "cut" and every == 2 else {}), **overwrite(name, every))
            found.append(results(config))
    assert equal(*found)
    state = tmp_path / "cut" / "checkpoint-2" / "state.json"
    if every == 2:
        assert [one["rollout"] for one in json.loads(state.read_text())["stage"]["ahead"]] == [2]


@pytest.mark.parametrize("waits", representatives([True, False], True))
def test_a_run_that_ends_leaves_no_thread_behind(world, tmp_path, monkeypatch, waits):
    """After a rollback the next attempt loads its models and uses the server. The twin does not wait."""

    asked, goes_on, close = threading.Event(), threading.Event(), Alongside.close

    def dies(*args, **how):
        assert asked.wait(STUCK)
        raise Killed

    def holds():
        nonlocal answers
        with lock:
            answers += 1
            ahead = answers > 8  # those before are of rollout 0
        if ahead:
            asked.set()
            assert goes_on.wait(STUCK)

    def ends(own):
        if waits:
            goes_on.set()
            close(own)

    def drawing_ahead():
        return [one for one in threading.enumerate() if one.name.startswith("rollouts ahead")]

    answers, lock, before = 0, threading.Lock(), drawing_ahead()
    monkeypatch.setattr(training_step, "accumulate_gradients", dies)
    monkeypatch.setattr(Alongside, "close", ends)
    with drawing(world) as (address, server):
        server.before_an_answer = holds
        with pytest.raises(Killed):
            run(served(world, tmp_path / "run", address))
        left = [one for one in drawing_ahead() if one not in before]
        goes_on.set()
    assert bool(left) != waits


def overwrite(name: str, every: int) -> dict[str, bool]:
    """Before its first checkpoint a run has nothing to go on from."""
    return {"overwrite": True} if name == "cut" and every > 2 else {}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_plan_has_the_weights_that_are_kept(world, tmp_path, kind):
    """On a CPU in the total. The embedded engine keeps the answers alone, and without `ahead` nothing is kept."""
    config = config_of(world, tmp_path / "run", kind, ahead=1)
    server = {"engine": "vllm", "vllm_url": "http://127.0.0.1:9"}
    answers, both, none = (
        surefoot.plan(config | {"grpo": config["grpo"] | more}).memory.ahead for more in ({}, server, {"ahead": 0})
    )
    model = AutoModelForCausalLM.from_pretrained(world / "base")
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    alongside = Alongside(model)
    alongside.begin([lambda: None])
    kept = [one.nbytes for one in alongside._weights]
    alongside.close()
    assert both - answers == sum(kept) + max(kept)
    assert answers > none == 0
