"""Rollouts that a server draws while the trainer trains: that they do, and that it changes no bit."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
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
from surefoot.config.load import check_config
from surefoot.methods.grpo.alongside import Alongside
from surefoot.methods.rewards import terms
from surefoot.methods.rollouts import RolloutEngine
from surefoot.models import vllm
from surefoot.runs.output_folder import disk_of
from surefoot.training import step as training_step
from surefoot.training.interrupt import StopRequest

__all__ = ["world"]
STUCK = 60.0  # seconds after which a wait for the other side has failed


class Drawing:
    """A server whose answers depend on the adapter that it was told, and on the seed. It tells the base's
    log-probabilities, which are the policy's before the first update."""

    def __init__(self, world: Path):
        self.base = AutoModelForCausalLM.from_pretrained(world / "base").eval()
        self.adapters: dict[str, int] = {}
        self.before_an_answer = lambda prompt: None

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
            self.before_an_answer(prompt)
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
        RolloutEngine, "__init__", lambda own, rollouts, follow, *more: real(own, rollouts, follow, False, *more[1:])
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

    def waits_for_an_update(prompt):
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


# Checkpoints of the kill point, what else, and what the last one before it asks for: (step, number of the rollout).
KILLED = ((2, {}, [[2, 2]]), (9, {}, None), (1, {"epochs": 2, "rollout_batches": 2, "redraw": 2}, [[1, 1]]))


@pytest.mark.parametrize(("every", "more", "asked"), representatives(KILLED, KILLED[0], KILLED[2]))
def test_killed_while_answers_are_drawn_it_goes_on_bit_for_bit(world, tmp_path, every, more, asked):
    found = []
    for name in ("whole", "cut"):
        with drawing(world) as (address, _):
            config = served(world, tmp_path / name, address, **more)
            config |= {"checkpoint": {"every": f"{every} steps", "keep": 9}}
            if name == "cut":
                with killed(training_step, "accumulate_gradients", 4):
                    run(config)
            run(config, vowels, **({"resume": True} if name == "cut" and asked else {}), **overwrite(name, every))
            found.append(results(config))
    assert equal(*found)
    if asked:
        state = tmp_path / "cut" / f"checkpoint-{3 if every == 1 else 2}" / "state.json"
        assert json.loads(state.read_text())["stage"]["drawing"] == asked


@pytest.mark.parametrize("puts_in", representatives([True, False], True))
def test_interrupted_while_a_server_is_silent_it_waits_for_nothing_and_goes_on_bit_for_bit(
    world, tmp_path, monkeypatch, puts_in
):
    """The twin draws again with the weights of the checkpoint, not with those that drew."""
    silent, goes_on, real = threading.Event(), threading.Event(), training_step.accumulate_gradients

    def is_silent_in_the_third_rollout(prompt):
        nonlocal answers
        with lock:
            answers += 1
            late = answers > 16
        if late:
            silent.set()
            assert goes_on.wait(STUCK)

    def interrupts(*args, **how):
        nonlocal updates
        updates += 1
        if updates == 2:
            assert silent.wait(STUCK)
            signal.raise_signal(signal.SIGINT)
        return real(*args, **how)

    answers, updates, lock = 0, 0, threading.Lock()
    with drawing(world) as (address, server), monkeypatch.context() as patched:
        config = served(world, tmp_path / "cut", address)
        server.before_an_answer = is_silent_in_the_third_rollout
        patched.setattr(training_step, "accumulate_gradients", interrupts)
        before = drawing_ahead()
        assert not surefoot.train(config, reward=vowels, stream=io.StringIO()).finished
        assert drawing_ahead() == before
        goes_on.set()
    with drawing(world) as (address, _), monkeypatch.context() as patched:
        if not puts_in:
            patched.setattr(Alongside, "resume", draws_with_the_weights_that_are_there)
        config["grpo"]["vllm_url"] = address
        run(config, resume=True)
    with drawing(world) as (address, _):
        whole = served(world, tmp_path / "whole", address)
        run(whole)
    assert equal(results(whole), results(config)) == puts_in


# What is waited for: number of the first request, to the engine or the grader, that is not answered; last step before.
WAITS = {"rollout": (17, 2), "redraw": (26, 1), "redraw ahead": (30, 1), "evaluation": (9, 1), "reward": (3, 1)}


@pytest.mark.parametrize("where", representatives(tuple(WAITS), "redraw ahead"))
@pytest.mark.parametrize("gives_up", representatives([True, False], True))
def test_interrupted_while_it_waits_for_a_server_it_waits_no_more_and_goes_on_bit_for_bit(
    world, tmp_path, monkeypatch, where, gives_up
):
    """The twin waits for the answer, and is a step or an evaluation further."""

    def interrupts(prompt=None):
        nonlocal count
        with lock:
            count += 1
            here = count == WAITS[where][0]
        if here:
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(STUCK if gives_up else 0.5)

    def trained(name: str, *, silent: bool = False, **how) -> dict:
        with drawing(world) as (address, server):
            config = served(world, tmp_path / name, address, ahead=int(where == "redraw ahead"))
            given = {"reward": vowels}
            if where == "reward":
                config["grpo"]["rewards"], given = [judging.address], {}
                judge.before = interrupts if silent else lambda: None
            elif silent:
                server.before_an_answer = interrupts
            if where.startswith("redraw"):
                config["grpo"]["redraw"], given = 2, {"reward": of_some_prompts}
            if where == "evaluation":
                config["data"]["eval"], config["eval_every"] = 1, "1 steps"
            surefoot.train(config, stream=io.StringIO(), **given, **how)
            goes_on.set()
        return config

    count, lock, goes_on, judge = 0, threading.Lock(), threading.Event(), Judging()
    with answering(judge.reply) as judging:
        with monkeypatch.context() as patched:
            if not gives_up:
                patched.setattr(StopRequest, "gives_up", lambda own, give_up: None)
            trained("cut", silent=True)
        lines = list(map(json.loads, (tmp_path / "cut" / "trainer_log.jsonl").open()))
        steps = sum("loss" in line for line in lines)
        assert (steps > WAITS[where][1] or len(lines) > steps) != gives_up
        assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == [f"checkpoint-{steps}"]
        assert equal(results(trained("whole")), results(trained("cut", resume=True)))


def of_some_prompts(prompts, responses, answer):
    """Groups of every other prompt have no spread, so that they are redrawn."""
    return [
        float(int(one) % 2 and sum(letter in "aeiou" for letter in text))
        for one, text in zip(answer, responses, strict=True)
    ]


def draws_with_the_weights_that_are_there(own, draw):
    if own.asked and not own._draws:
        own._follow()
        own._submit(draw)


def drawing_ahead() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("rollouts ahead")]


@pytest.mark.parametrize("gives_up", representatives([True, False], True))
def test_a_run_that_ends_leaves_no_thread_behind(world, tmp_path, monkeypatch, gives_up):
    """After a rollback the next attempt loads its models and uses the server, which answers no more in the meantime.
    The twin does not give its requests up."""
    asked, goes_on = threading.Event(), threading.Event()

    def dies(*args, **how):
        assert asked.wait(STUCK)
        raise Killed

    def holds(prompt):
        nonlocal answers
        with lock:
            answers += 1
            ahead = answers > 8  # those before are of rollout 0
        if ahead:
            asked.set()
            assert goes_on.wait(STUCK)

    answers, lock, before = 0, threading.Lock(), drawing_ahead()
    monkeypatch.setattr(training_step, "accumulate_gradients", dies)
    if not gives_up:
        monkeypatch.setattr(Alongside, "close", lambda own: None)
    with drawing(world) as (address, server):
        server.before_an_answer = holds
        with pytest.raises(Killed):
            run(served(world, tmp_path / "run", address))
        left = [one for one in drawing_ahead() if one not in before]
        goes_on.set()
    assert bool(left) != gives_up


def overwrite(name: str, every: int) -> dict[str, bool]:
    """Before its first checkpoint a run has nothing to go on from."""
    return {"overwrite": True} if name == "cut" and every > 2 else {}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_plan_has_the_weights_that_are_kept(world, tmp_path, kind):
    """On a CPU in the total. The embedded engine keeps the answers alone, and without `ahead` nothing is kept."""
    config = config_of(world, tmp_path / "run", kind, ahead=1)
    server = {"engine": "vllm", "vllm_url": "http://127.0.0.1:9"}
    configs = [check_config(config | {"grpo": config["grpo"] | more}) for more in ({}, server, {"ahead": 0})]
    plans = [surefoot.plan(one) for one in configs]
    answers, both, none = (one.memory.ahead for one in plans)
    sizes = [disk_of(*one).checkpoint for one in zip(configs, plans, strict=True)]
    assert sizes[1] - sizes[0] == 4 * plans[0].trainable
    assert sizes[0] == sizes[2]
    model = AutoModelForCausalLM.from_pretrained(world / "base")
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    alongside = Alongside(model, lambda: None, lambda: None)
    alongside.begin([(1, 1)], lambda step, number: None)
    kept = [one.nbytes for one in alongside.weights]
    alongside.close()
    assert both - answers == sum(kept) + max(kept)
    assert answers > none == 0


class Judging:
    """A reward's server: more for more vowels. It notes how many answers each request has."""

    def __init__(self):
        self.sizes, self.before = [], lambda: None

    def reply(self, path, body):
        self.sizes.append(len(body["responses"]))
        self.before()
        return 200, {"scores": [sum(letter in "aeiou" for letter in text) / 4 for text in body["responses"]]}


@pytest.mark.parametrize("ahead", representatives([0, 1], 0))
def test_a_server_scores_groups_while_others_are_drawn_and_no_bit_changes(world, tmp_path, monkeypatch, ahead):
    """The second prompt is only answered when the reward's server has been asked about the first. The twin asks about
    all answers together, afterwards."""

    def trained(name: str, early: bool) -> list[int]:
        judge, drawn, lock, scored = Judging(), [], threading.Lock(), threading.Event()
        judge.before = scored.set

        def holds(prompt):
            with lock:
                drawn.append(prompt)
            assert prompt == drawn[0] or not early or scored.wait(STUCK)

        with drawing(world) as (address, server), answering(judge.reply) as judging:
            server.before_an_answer = holds
            config = served(world, tmp_path / name, address, ahead)
            config["grpo"]["rewards"] = [judging.address, {"name": "regex", "pattern": "e", "weight": 0.1}]
            config |= {"duration": "3 steps", "checkpoint": {"every": "9 steps"}}
            surefoot.train(config, stream=io.StringIO())
        found.append(results(config))
        return judge.sizes

    found = []
    monkeypatch.setattr(vllm, "_AT_ONCE", 4)  # the first prompt is answered before the second is asked
    assert trained("as drawn", True) == [4] * 6
    monkeypatch.setattr(terms, "_AT_ONCE", 0)
    assert trained("after", False) == [8] * 3
    assert equal(*found)
