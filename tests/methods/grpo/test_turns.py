"""Stage grpo with an environment, as a whole: what it learns from, logs and keeps, kills, engines, wrong inputs."""

from __future__ import annotations

import io
import json
import re
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.killed import killed
from helpers.tiers import representatives
from helpers.tiny_models import curt
from helpers.vllm_answers import completion
from surefoot.commands.main import main
from surefoot.data.batching.groups import GroupEpisode, group_batches, groups_from_tensors, groups_to_tensors
from surefoot.data.batching.loader import Layout
from surefoot.methods.environments.multi_turn import MultiTurn
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.grpo.alongside import Alongside
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.training import step as training_step

RATIO = 1e-5  # of fp32 sums in another order
UNEQUAL = ("elapsed_time", "remaining_time", "throughput", "peak_memory")
TOOL = """
import pathlib

ASKED = pathlib.Path(__file__).with_name("asked.txt")


class Counter:
    def reset(self, record, seed):
        self.turns = 0

    def step(self, answer):
        with ASKED.open("a") as file:
            file.write(f"{len(answer)}\\n")
        self.turns += 1
        return {"observation": f"so {len(answer)}", "reward": len(answer) % 3, "done": self.turns + len(answer) % 2 > 2}
"""


@pytest.fixture
def world(tmp_path) -> Path:
    curt(tmp_path / "base", every=3)
    rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tool.py").write_text(TOOL)
    return tmp_path


def config_of(world: Path, name: str, **grpo) -> dict:
    environment = {"name": f"{world / 'tool.py'}:Counter", "turns": 3}
    return {
        "stage": "grpo",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 128},
        "grpo": {"max_new_tokens": 64, "group": 4, "environment": environment, **grpo},
        "batch": {"size": 8, "micro": 3},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "duration": "3 steps",
        "output": str(world / name),
    }


def run(config: dict, **how) -> list[dict]:
    surefoot.train(config, stream=io.StringIO(), **how)
    lines = (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in rows]


def answers_of(config: dict) -> list[dict]:
    return [json.loads(one) for one in (Path(config["output"]) / "answers.jsonl").read_text().splitlines()]


def asked(world: Path) -> int:
    return len((world / "asked.txt").read_text().splitlines())


@pytest.mark.parametrize("more", [{}, {"top_p": 0.8, "correction": "token_truncate", "kl": 0.1}])
def test_what_learns_finds_the_tokens_as_likely_as_when_they_were_drawn(world, more):
    """Over what was drawn and given together; a policy that is not moved yet has a ratio of 1."""
    config = config_of(world, "run", rewards=[{"name": "length", "longest": 30, "weight": 0.5}], **more)
    config["data"]["eval"] = str(world / "prompts.jsonl")
    rows = run(config)
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=RATIO)
    assert rows[0]["mismatch"] < RATIO
    assert {"turns", "over_turns", "over_tokens", "reward_environment", "reward_length"} <= rows[0].keys()
    assert rows[0]["reward"] == pytest.approx(rows[0]["reward_environment"] + 0.5 * rows[0]["reward_length"])
    assert 1 < rows[0]["turns"] <= 3
    assert any(row["grad_norm"] > 0 for row in rows)
    several = [one for one in answers_of(config) if "turns" in one]
    assert several
    assert all(one["answer"] == one["turns"][-1] for one in several)
    assert all(said.startswith("so ") for one in several for said in one["turns"][1::2])
    results = json.loads((Path(config["output"]) / "all_results.json").read_text())
    assert results["eval_turns"] >= 1


def test_twin_other_ids_than_the_engine_saw_are_found_out(world, monkeypatch):
    real = MultiTurn.converse

    def changed(self, *arguments, **more):
        heard = real(self, *arguments, **more)
        return replace(heard, answers=[_with_other_words(one) for one in heard.answers])

    monkeypatch.setattr(MultiTurn, "converse", changed)
    with raises_fault("SF-PLAN-BROKEN", "grpo"):
        run(config_of(world, "run"))


def _with_other_words(answer):
    """In the place of what the environment said first."""
    if not answer.pieces:
        return answer
    start, size = answer.pieces[:2]
    return replace(answer, response=(*answer.response[:start], *[7] * size, *answer.response[start + size :]))


def test_only_drawn_tokens_are_learned_from_and_counted():
    episode = GroupEpisode(
        0, 1, (1, 2), (3, 4, 5, 6, 7), 9, 0.5, True, torch.tensor([-1.0, -2.0, -3.0]), None, None, None, (2, 2, 1)
    )
    (batch,) = group_batches([episode], Layout(0, 1), of_tokens=True)
    assert batch.weight == 3
    assert batch.rows.targets.tolist() == [[-100, 3, 4, -100, -100, 7, -100]]
    assert batch.advantages.tolist() == [0.5] * 3
    plain = replace(episode, logprobs=torch.zeros(5), pieces=())
    for one in ([episode, plain], [plain], [episode]):
        found = groups_from_tensors(groups_to_tensors(one), [9] * len(one))
        assert [(a.response, a.pieces, a.logprobs.tolist()) for a in found] == [
            (a.response, a.pieces, a.logprobs.tolist()) for a in one
        ]


DRAWN = ({}, {"redraw": 1, "top_p": 0.9, "ahead": 1, "overlong": "mask"})


@pytest.mark.parametrize("more", representatives(DRAWN, DRAWN[1]))
def test_killed_between_turns_it_goes_on_bit_for_bit_and_calls_nothing_again(world, more):
    whole = config_of(world, "whole", rollout_batches=2, epochs=2, kl=0.1, **more)
    whole |= {"duration": "6 steps", "checkpoint": {"every": "1 steps", "keep": 9}}
    cut = {**whole, "output": str(world / "cut")}
    wanted = run(whole)
    calls = asked(world)
    with killed(EmbeddedRollouts, "answer", 5):  # the second rollout's second turn, or a redraw's
        run(cut)
    before = asked(world) - calls
    assert 0 < before < calls
    assert run(cut, resume=True) == wanted
    assert answers_of(cut) == answers_of(whole)
    weights = [load_file(Path(one["output"]) / "adapter_model.safetensors") for one in (whole, cut)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    # Of an episode that was cut, what was said before is said again to a new one: at most one turn of each answer.
    assert calls <= asked(world) - calls <= calls + 16


def in_turns(world, requests: list[dict]):
    """The answers of a server that tells the base's log-probabilities."""
    base = AutoModelForCausalLM.from_pretrained(world / "base").eval()

    def reply(path, body):
        if path != "/inference/v1/generate":
            return 200, {"data": [{"id": "base"}]} if path == "/v1/models" else "Success"
        prompt, own = body["token_ids"], body["sampling_params"]
        requests.append(body)
        stop = min(own["stop_token_ids"])
        ids = [
            41 + 4 * ((own["seed"] >> place) % 20) for place in range(min(1 + own["seed"] % 4, own["max_tokens"] - 1))
        ] + [stop]
        with torch.no_grad():
            logp = base(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        told = [float(row[token]) for row, token in zip(logp, ids, strict=True)]
        return 200, completion(ids, told, model=body["model"])

    return reply


def test_a_server_draws_in_turns(world):
    """Ids go there as they are put together here, and each turn may have what the turns before left."""
    requests: list[dict] = []
    with answering(in_turns(world, requests)) as stub:
        config = config_of(world, "run", engine="vllm", vllm_url=stub.address)
        config |= {"duration": "1 steps", "batch": {"size": 4, "micro": 3}}
        (row,) = run(config)
    assert row["mismatch"] < RATIO
    drawn = [one for one in requests if one["sampling_params"]["max_tokens"] > 1]
    lengths = sorted(len(one["token_ids"]) + one["sampling_params"]["max_tokens"] for one in drawn)
    assert len(drawn) == round(4 * row["turns"])
    assert lengths[0] == lengths[-1]  # of prompts of one length
    assert len({one["sampling_params"]["seed"] for one in drawn}) == len(drawn)


@pytest.mark.parametrize("looks_back", representatives([True, False], True))
def test_replies_to_what_was_asked_before_a_checkpoint_are_found_again(world, monkeypatch, looks_back):
    """The answers of rollout 1 are drawn from step 1 on, and checkpoint-3 has none of them. The twin looks up replies
    since its step."""
    begins = Alongside._submit

    def ends(own, draw):
        begins(own, draw)
        wait(own._draws)  # so all replies are there when it is killed

    monkeypatch.setattr(Alongside, "_submit", ends)
    with answering(in_turns(world, [])) as stub:
        loose = {"mismatch": "caution", "mismatch_bound": 100.0}
        cut = config_of(
            world, "cut", engine="vllm", vllm_url=stub.address, rollout_batches=2, epochs=2, ahead=1, **loose
        )
        cut |= {"duration": "5 steps", "checkpoint": {"every": "3 steps", "keep": 9}}
        run({**cut, "output": str(world / "whole")})
        calls = asked(world)
        with killed(training_step, "accumulate_gradients", 4):
            run(cut)
        if not looks_back:
            real = Recorded.__init__
            monkeypatch.setattr(Recorded, "__init__", lambda own, folder, rank, step: real(own, folder, rank, 3))
        state = json.loads((world / "cut" / "checkpoint-3" / "state.json").read_text())
        run(cut, resume=True)
    assert state["stage"]["drawing"] == [[1, 1]]
    assert (asked(world) - calls == calls) == looks_back


def test_another_environment_does_not_resume(world):
    config = config_of(world, "run")
    config["checkpoint"] = {"every": "1 steps"}
    run(config)
    config["duration"] = "4 steps"
    (world / "tool.py").write_text(TOOL.replace("% 3", "% 5"))
    with raises_fault("SF-RESUME-CHANGED", "grpo.environment"):
        run(config, resume=True)


@pytest.mark.parametrize(
    ("line", "fails", "outcome", "said"),
    [
        ("self.turns += 1", "self.turns += 1 // (self.own != '3')", "raised", "ZeroDivisionError"),
        ("len(answer) % 3", "float('nan') if self.own == '3' else len(answer) % 3", "not_finite", "nan"),
    ],
)
def test_answers_that_an_environment_lost_are_counted_and_left_out(world, line, fails, outcome, said):
    (world / "tool.py").write_text(
        TOOL.replace(line, fails).replace("self.turns = 0", "self.turns, self.own = 0, record['answer']")
    )
    config = config_of(world, "run", patience=9) | {"batch": {"size": 24}, "duration": "2 steps"}
    rows = run(config)
    assert all("reward_environment" in row for row in rows)  # the only reward
    assert sum(row.get(f"environment_{outcome}", 0) for row in rows) == 4
    assert not any(name.startswith("rewards_") or name == "environment_timed_out" for row in rows for name in row)
    lost = [one for one in answers_of(config) if one["score"] is None]
    assert len(lost) == 4
    assert {one["rewards"]["environment"]["outcome"] for one in lost} == {outcome}
    events = (Path(config["output"]) / "events.jsonl").read_text()
    assert said in events


def test_a_function_reads_the_turns(world):
    (world / "style.py").write_text(
        "from transformers import AutoTokenizer\n\n"
        f"TOKENIZER = AutoTokenizer.from_pretrained({str(world / 'base')!r})\n\n\n"
        "def turns_of(prompts, responses, response_ids, turns):\n"
        "    assert all(said[-1] == response for said, response in zip(turns, responses))\n"
        "    assert TOKENIZER.batch_decode(response_ids, skip_special_tokens=True) == responses\n"
        "    return [len(said) for said in turns]\n"
    )
    config = config_of(world, "run", rewards=[f"{world / 'style.py'}:turns_of"])
    config["duration"] = "1 steps"
    (row,) = run(config)
    assert row["reward_turns_of"] == pytest.approx(2 * row["turns"] - 1)
    kept = answers_of(config)
    assert sum(one["tokens"] for one in kept) / len(kept) == pytest.approx(row["response_length"])


def test_a_limit_of_length_is_one_of_the_last_turn(world):
    config = config_of(world, "run", rewards=[{"name": "length", "longest": 20}])
    config["duration"] = "1 steps"
    run(config)
    lengths = [one for one in answers_of(config) if len(one.get("turns", ())) > 1 and one["ended"]]
    assert lengths
    said = [int(one["rewards"]["length"]["reason"].split()[0]) for one in lengths]
    assert all(0 < size < one["tokens"] for size, one in zip(said, lengths, strict=True))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["grpo.environment.name=nothing.py:Own"], "SF-FILE-MISSING"),
        (["data.template=alpaca", "data.max_length=400"], "SF-ENVIRONMENT"),
        (["grpo.environment.turns=0"], "SF-CONFIG-VALUE"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(world, changes, code):
    path = world / "run.yaml"
    path.write_text(json.dumps(config_of(world, "run")))
    done = CliRunner().invoke(main, ["train", str(path), *changes])
    assert done.exit_code == 2, done.output
    assert code in done.output
    assert not (world / "run" / "trainer_log.jsonl").exists()


def test_an_evaluation_that_the_environment_loses_does_not_end_the_run(world):
    (world / "tool.py").write_text(
        TOOL.replace("self.turns += 1", "self.turns += 1 // (self.own != 'held out')").replace(
            "self.turns = 0", "self.turns, self.own = 0, record['answer']"
        )
    )
    (world / "held.jsonl").write_text(json.dumps({"prompt": "Say number 5.", "answer": "held out"}) + "\n")
    config = config_of(world, "run", eval_answers=2)
    config["data"]["eval"] = str(world / "held.jsonl")
    config |= {"duration": "2 steps", "eval_every": "1 steps"}
    assert len(run(config)) == 2
    events = (Path(config["output"]) / "events.jsonl").read_text()
    assert "ZeroDivisionError" in events


def test_an_environment_may_read_every_field(world):
    path = world / "run.yaml"
    config = config_of(world, "run", rewards=["json"])  # which reads none of its own
    read = {}
    for name in ("with", "without"):
        path.write_text(json.dumps(config))
        done = CliRunner().invoke(main, ["data", str(path), "--json"])
        assert done.exit_code == 0, done.output
        read[name] = json.loads(done.stdout)["train"]["unused_fields"]
        config["grpo"].pop("environment", None)
    assert read == {"with": [], "without": ["answer"]}


@pytest.mark.slow
def test_a_run_that_lost_answers_ended_asks_for_them_again(world):
    """Calls for three of step 2's four prompts fail, too many, or for all; they work again before the resume."""
    (world / "tool.py").write_text(
        TOOL.replace("self.turns = 0", "self.turns = 0 // (record['answer'] not in DOWN.read_text().split())")
        + '\n\nDOWN = ASKED.with_name("down.txt")\n'
    )
    (world / "down.txt").write_text("")
    config = config_of(world, "whole") | {"checkpoint": {"every": "1 steps"}, "batch": {"size": 16}}
    config["duration"] = "2 steps"
    wanted = run(config)
    prompts = {one["record"]: one["prompt"] for one in answers_of(config) if one["step"] == 2}.values()
    down = [re.search(r"number (\d+)", one)[1] for one in prompts]
    assert len(down) == 4
    for lost, code, where in ((3, "SF-GRPO", "step 2"), (4, "SF-ENVIRONMENT", world / "tool.py:9")):
        config["output"] = str(world / f"without {lost}")
        (world / "down.txt").write_text("\n".join(down[:lost]))
        with raises_fault(code, where):
            run(config)
        (world / "down.txt").write_text("")
        assert run(config, resume=True) == wanted
