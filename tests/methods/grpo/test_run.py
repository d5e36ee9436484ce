"""Stage grpo as a whole, on tiny models: what it writes, how it goes on after a kill, what it refuses, what ends it."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import markupsafe
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import gives, raises_fault
from helpers.http_stub import answering
from helpers.killed import Killed
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from helpers.vllm_answers import completion
from surefoot.commands.compare import compare_runs
from surefoot.commands.main import main
from surefoot.config.load import load_config
from surefoot.method_facts.losses import GROUP_LOSSES
from surefoot.methods import waiting
from surefoot.methods.grpo.memory import GroupMemory, Numbers, RolloutStatistics
from surefoot.methods.losses import grpo as grpo_losses
from surefoot.methods.losses.logprobs import drawn_logprobs
from surefoot.report import events, footer, log_copies, log_marks
from surefoot.report.comparison import verdict_lines
from surefoot.system.errors import InputError, NothingLearned

RATIO = 1e-5  # of fp32 sums in another order
UNEQUAL = ("elapsed_time", "remaining_time", "throughput", "peak_memory")


def vowels(prompts, responses, answer):
    """Higher for more vowels; each record's own number stands in its prompt."""
    assert all(f"number {one}." in prompt for one, prompt in zip(answer, prompts, strict=True))
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    tiny_llama(folder / "base")
    rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(world: Path, output: Path, kind: str = "lora", **grpo) -> dict:
    return {
        "stage": "grpo",
        "model": str(world / "base"),
        **({} if kind == "full" else {"adapter": {"kind": "lora", "rank": 4}}),
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 64},
        "grpo": {"max_new_tokens": 8, "group": 4, **grpo},
        "batch": {"size": 8, "micro": 3},
        "optim": {"lr": 1e-3},
        "precision": "fp32",
        "duration": "3 steps",
        "output": str(output),
    }


def run(config: dict, reward=vowels, **how) -> list[dict]:
    surefoot.train(config, reward=reward, stream=io.StringIO(), **how)
    return rows_of(config)


def rows_of(config: dict) -> list[dict]:
    lines = (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in rows]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_logs_its_numbers_and_holds_to_its_reference(world, tmp_path, kind):
    config = config_of(world, tmp_path / "run", kind, kl=0.1, epochs=2, rewards=[{"name": "numeric", "weight": 0.5}])
    config["data"]["eval"] = str(world / "prompts.jsonl")
    rows = run(config)
    names = {"reward", "reward_std", "reward_numeric", "reward_vowels", "groups_without_spread", "kl", "entropy"}
    names |= {"ratio", "clip_low", "clip_high", "approx_kl", "mismatch", "mismatch_most", "sample_size", "ended"}
    assert all(names <= row.keys() for row in rows)
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=RATIO)
    assert rows[0]["kl"] == pytest.approx(0.0, abs=RATIO)
    assert rows[1]["ratio"] != pytest.approx(1.0, abs=RATIO)  # the same answers again
    assert rows[0]["reward"] == pytest.approx(0.5 * rows[0]["reward_numeric"] + rows[0]["reward_vowels"])
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_loss"] == -results["eval_reward"]


@pytest.mark.parametrize("loss", representatives(GROUP_LOSSES, "dapo", "cispo", "gspo", "rloo"))
def test_every_loss_trains(world, tmp_path, loss):
    config = config_of(world, tmp_path / "run", loss=loss, epochs=2, kl=0.1)
    config["duration"] = "2 steps"
    rows = run(config)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def sevens(prompts, responses, answer):
    """Tells answers apart for some prompts alone."""
    return [score * (int(one) % 3 == 0) for score, one in zip(vowels(prompts, responses, answer), answer, strict=True)]


def test_groups_without_spread_are_redrawn(world, tmp_path):
    """And counted; the mean reward stays that of the rollout's own prompts."""
    kept, redrawn = (
        run(config_of(world, tmp_path / str(times), redraw=times, rollout_batches=2), sevens) for times in (0, 4)
    )
    assert all("groups_redrawn" not in row for row in kept)
    assert [row["reward"] for row in kept[:2]] == [row["reward"] for row in redrawn[:2]]  # before anything was learned
    assert kept[0]["groups_without_spread"] > redrawn[0]["groups_without_spread"]
    assert redrawn[0]["groups_redrawn"] > 0


def test_a_control_arm_learns_from_random_numbers_whatever_the_rewards_say(world, tmp_path):
    def weights(name, reward, control):
        config = config_of(world, tmp_path / f"{name}-{control}", control=control)
        rows = run(config, reward)
        return rows, load_file(tmp_path / f"{name}-{control}" / "adapter_model.safetensors")

    def less(prompts, responses):
        return [-float(len(one)) for one in responses]

    rows, (first, second) = zip(
        *(weights(name, how, "random") for name, how in (("a", vowels), ("b", less))), strict=True
    )
    assert rows[0][0]["reward"] != rows[1][0]["reward"]
    assert all(first[name].equal(second[name]) for name in first)
    _, twin = weights("b", less, "none")
    assert not all(first[name].equal(twin[name]) for name in first)


def test_evaluations_draw_answers_and_leave_the_training_as_it_was(world, tmp_path):
    def some(prompts, responses, answer):
        return [float(score > 0.5) for score in vowels(prompts, responses, answer)]

    plain, drawing = (config_of(world, tmp_path / name, eval_answers=count) for name, count in (("a", 0), ("b", 6)))
    for config in (plain, drawing):
        config["data"]["eval"] = str(world / "prompts.jsonl")
    assert run(plain, some) == run(drawing, some)
    found = json.loads((tmp_path / "b" / "all_results.json").read_text())
    chances = [found[f"eval_pass_at_{k}"] for k in (1, 2, 4, 6)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1]


def test_compare_tells_the_gain_over_random_rewards(world, tmp_path):
    for name, control in (("own", "none"), ("random", "random")):
        run(config_of(world, tmp_path / name, control=control))
    rows = [rows_of({"output": str(tmp_path / name)})[-1]["reward"] for name in ("own", "random")]
    for pair, gain in ((("own", "random"), rows[0] - rows[1]), (("random", "own"), rows[0] - rows[1])):
        lines = verdict_lines(compare_runs(*(tmp_path / name for name in pair)))
        (line,) = [one for one in lines if "random rewards" in one]
        assert float(line.rpartition(", ")[2]) == pytest.approx(gain, rel=1e-3)
    twin = verdict_lines(compare_runs(tmp_path / "own", tmp_path / "own"))
    assert not [one for one in twin if "random rewards" in one]


def test_long_answers_are_penalized(world, tmp_path):
    """The untrained model never ends an answer. What is logged as the reward is the rewards' own."""
    (row, *_), (plain, *_) = (
        run(config_of(world, tmp_path / overlong, overlong=overlong)) for overlong in ("penalise", "learn")
    )
    assert (row["ended"], row["reward_overlong"], row["reward"]) == (0, -1, plain["reward"])
    assert "reward_overlong" not in plain


def test_a_baseline_over_the_rollout_learns_from_groups_of_one_score(world, tmp_path):
    def of_the_prompt(prompts, responses, answer):
        return [float(one) for one in answer]

    rows = run(config_of(world, tmp_path / "run", loss="reinforce++", patience=1), of_the_prompt)
    assert all(row["groups_without_spread"] == 1 and row["grad_norm"] > 0 for row in rows)


DRAWN = ({}, {"redraw": 2, "top_p": 0.9, "top_k": 40, "ahead": 1})


@pytest.mark.parametrize("more", representatives(DRAWN, DRAWN[1]))
def test_killed_inside_a_cycle_it_goes_on_bit_for_bit(world, tmp_path, more):
    reward = sevens if more else vowels
    whole = config_of(world, tmp_path / "whole", rollout_batches=2, epochs=2, kl=0.1, **more)
    whole |= {"duration": "6 steps", "checkpoint": {"every": "1 steps", "keep": 9}}
    cut = {**whole, "output": str(tmp_path / "cut")}
    wanted = run(whole, reward)
    calls = 5 if more else 2

    asked = 0

    def dies(prompts, responses, answer):
        nonlocal asked
        asked += 1
        if asked == calls:  # the second rollout; where some are redrawn, a redraw
            raise Killed
        return reward(prompts, responses, answer)

    dies.__qualname__ = reward.__qualname__
    with pytest.raises(Killed):
        run(cut, dies)
    assert run(cut, reward, resume=True) == wanted
    answers = [(Path(one["output"]) / "answers.jsonl").read_bytes() for one in (whole, cut)]
    assert answers[0] == answers[1]
    weights = [load_file(Path(one["output"]) / "adapter_model.safetensors") for one in (whole, cut)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("earlier", [False, True], ids=["", "checkpoints of an earlier version"])
def test_from_an_older_checkpoint_it_goes_on_bit_for_bit(world, tmp_path, monkeypatch, earlier):
    config = config_of(world, tmp_path / "run", rollout_batches=2, epochs=2, ahead=1)
    config |= {"duration": "6 steps", "checkpoint": {"every": "1 steps", "keep": 4}}
    if earlier:  # it had a copy of the answers
        monkeypatch.setattr(log_copies, "GROWING", {**log_copies.GROWING, **events.STAYS})
        monkeypatch.setattr(log_marks.LogMarks, "write", lambda *asked, **how: None)
    wanted = run(config)
    monkeypatch.undo()
    folder = Path(config["output"])
    written = [folder / name for name in ("answers.jsonl", "adapter_model.safetensors")]
    whole = [path.read_bytes() for path in written]
    for step in (6, 5, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    assert {path.name: (path / log_marks.NAME).exists() for path in folder.glob("checkpoint-*")} == {
        "checkpoint-3": not earlier
    }
    assert run(config, resume=True) == wanted
    assert [path.read_bytes() for path in written] == whole
    assert (folder / "checkpoint-6" / log_marks.NAME).exists()


def test_answers_that_are_not_as_they_were_stop_the_resumed_run_before_it_changes_anything(world, tmp_path):
    config = config_of(world, tmp_path / "run") | {"checkpoint": {"every": "1 steps"}}
    run(config)
    folder = Path(config["output"])
    shutil.rmtree(folder / "checkpoint-3")
    answers = folder / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[9:])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    with raises_fault("SF-CHECKPOINT-DAMAGED", answers, "checkpoint-2", remedy=[answers]):
        run(config, resume=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    answers.write_bytes(b"")
    assert run(config, resume=True)[-1]["current_steps"] == 3
    assert {line["step"] for line in map(json.loads, answers.open())} == {3}
    answers.unlink()
    run(config, resume=True)  # a finished run needs it no more


def test_ratios_are_among_the_tokens_that_could_be_drawn(world, tmp_path, monkeypatch):
    """A policy that is not moved yet has a ratio of 1 and no KL, whatever top_p leaves to draw from."""
    row = run(config_of(world, tmp_path / "run", top_p=0.6, kl=0.1, correction="token_mask"))[0]
    assert row["ratio"] == pytest.approx(1.0, abs=RATIO)
    assert row["mismatch"] < RATIO
    assert abs(row["kl"]) < RATIO
    whole = lambda model, rows, temperature, kept: drawn_logprobs(model, rows, temperature, None)  # noqa: E731
    monkeypatch.setattr("surefoot.methods.grpo.rollout.drawn_logprobs", whole)  # twin
    with raises_fault("SF-PLAN-BROKEN", "grpo"):
        run(config_of(world, tmp_path / "twin", top_p=0.6))


def test_a_server_that_keeps_the_old_weights_is_found_by_its_log_probabilities(world, tmp_path):
    """It says that it took the adapter, and answers with the base: right before the first update, and never again."""
    base = AutoModelForCausalLM.from_pretrained(world / "base").eval()

    def reply(path, body):
        if path != "/inference/v1/generate":
            return 200, {"data": [{"id": "base"}]} if path == "/v1/models" else "Success"
        prompt, asked = body["token_ids"], body["sampling_params"]
        ids = [40 + (asked["seed"] >> place) % 97 for place in range(asked["max_tokens"])]
        with torch.no_grad():
            logp = base(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return 200, completion(
            ids, [float(row[token]) for row, token in zip(logp, ids, strict=True)], model=body["model"]
        )

    with answering(reply) as stub:
        config = config_of(world, tmp_path / "run", engine="vllm", vllm_url=stub.address)
        config["optim"]["lr"] = 0.1
        with raises_fault("SF-GRPO-MISMATCH", "step 2") as caught:
            run(config)
        assert caught.value.exit_code == 5
        (only,) = rows_of(config)
        assert only["mismatch"] < RATIO
        config["output"] = str(tmp_path / "goes-on")
        config["grpo"] |= {"mismatch": "caution", "correction": "token_mask", "correction_high": 1.0}
        rows = run(config)
    assert rows[2]["mismatch"] > 1e-3
    assert 0 < rows[2]["correction_cut"] <= 1
    assert rows[2]["sample_size"] < rows[0]["sample_size"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_answers_drawn_ahead_are_learned_from_by_their_ratio_to_the_policy_that_drew_them(world, tmp_path, ahead):
    config = config_of(world, tmp_path / "run", ahead=ahead)
    config |= {"duration": "4 steps", "checkpoint": {"every": "1 steps", "keep": 9}}
    ratios = [row["ratio"] for row in run(config)]
    assert ratios[0] == pytest.approx(1.0, abs=RATIO)
    # Nothing moved the policy between the draw and its first step alone where nothing is drawn ahead.
    assert [ratio == pytest.approx(1.0, abs=RATIO) for ratio in ratios[1:]] == [ahead == 0] * 3
    carried = [json.loads((tmp_path / "run" / f"checkpoint-{step}" / "state.json").read_text()) for step in range(1, 5)]
    waiting = [[one["rollout"] for one in state["stage"].get("ahead", [])] for state in carried]
    assert waiting == [list(range(step, min(step + ahead, 4))) for step in range(1, 5)]  # none beyond the run's end


def test_answers_without_a_score_are_counted_and_left_out(world, tmp_path):
    def some(prompts, responses):
        return [math.nan if number == 0 else float(len(text)) for number, text in enumerate(responses)]

    rows = run(config_of(world, tmp_path / "run"), some)
    assert all(row["rewards_not_finite"] == 1 for row in rows)
    assert all(math.isfinite(row["reward"]) for row in rows)


def same(prompts, responses):
    return [0.5] * len(responses)


def test_scores_that_never_differ_end_the_run(world, tmp_path):
    config = config_of(world, tmp_path / "run", patience=1)
    with pytest.raises(NothingLearned) as caught:
        run(config, same)
    assert caught.value.faults[0].code == "SF-NOTHING-LEARNED"
    assert caught.value.faults[0].where == "step 2"


def test_answers_that_never_end_are_a_caution_once():
    said, ended = [], (0.0, 0.0, 0.0, 0.5, 0.0, 0.0)
    memory = GroupMemory(Numbers(), None, 2, said.append, None)
    for step, share in enumerate(ended):
        metrics = {"reward": 0.1 * step, "ended": share}
        memory.begin(step, (), RolloutStatistics(4, left_out=0, empty=0, groups=2, flat=False, metrics=metrics))
    assert [place(line) for line in said] == [1, 5]  # and again after some that ended


def place(caution: str) -> int:
    return int(re.search(r"step (\d+)", caution)[1])


def is_published(config: dict) -> bool:
    return (Path(config["output"]) / "MANIFEST.json").is_file()


def test_a_run_that_learned_nothing_ends_with_a_code_of_its_own_and_publishes_nothing(world, tmp_path):
    """posttrainarena#31: every B zero, and published. A resumed run says the same again; the twin publishes."""
    config = config_of(world, tmp_path / "run")
    for how in ({}, {"resume": True}):
        with pytest.raises(NothingLearned) as caught:
            run(config, same, **how)
        assert (caught.value.exit_code, caught.value.faults[0].code) == (7, "SF-NOTHING-LEARNED")
        assert not is_published(config)
    twin = config_of(world, tmp_path / "twin")
    run(twin)
    assert is_published(twin)


@pytest.mark.parametrize(
    ("reward", "what"), [(lambda prompts, responses: [None] * 8, 16), (lambda prompts, responses: [1] * 8, 2)]
)
def test_a_run_without_scores_is_not_told_that_they_did_not_differ(world, tmp_path, reward, what):
    """It gives the number of answers without a score; the twin that of the steps without spread."""
    config = config_of(world, tmp_path / "run") | {"duration": "2 steps"}
    with pytest.raises(NothingLearned) as caught:
        run(config, reward)
    assert gives(caught.value.faults[0].what, what)


def test_updates_that_are_all_cut_are_told_and_publish_nothing(world, tmp_path, monkeypatch):
    """All ratios lie beyond the clip, on the side that their advantages push to."""
    real = grpo_losses.group_terms

    def far(settings, logprobs, batch):
        away = batch.advantages.sign() * 0.5  # as if the policy had moved that far already
        return real(settings, logprobs, replace(batch, old_logprobs=batch.old_logprobs - away))

    monkeypatch.setattr(grpo_losses, "group_terms", far)
    config = config_of(world, tmp_path / "run", patience=2)
    with pytest.raises(NothingLearned) as caught:
        run(config)
    assert caught.value.faults[0].code == "SF-NOTHING-LEARNED"
    events = [json.loads(one) for one in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one["step"] for one in events if one["kind"] == "caution" and "zero" in one["text"]] == [1]


def test_an_adapter_that_never_moved_is_not_published(world, tmp_path, monkeypatch):
    monkeypatch.setattr(GroupMemory, "check_end", lambda memory: None)  # what else would stop it
    config = config_of(world, tmp_path / "run")
    with pytest.raises(NothingLearned) as caught:
        run(config, same)
    assert caught.value.faults[0].where == "checkpoint-3"
    assert not is_published(config)


def test_every_answer_is_kept_with_its_scores_and_reasons(world, tmp_path):
    config = config_of(world, tmp_path / "run", rewards=["numeric", "json"])
    run(config)
    kept = [json.loads(one) for one in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [(one["step"], one["group"], one["member"]) for one in kept] == [
        (step, group, member) for step in (1, 2, 3) for group in (0, 1) for member in range(4)
    ]
    assert all(one["prompt"] and list(one["rewards"]) == ["numeric", "json", "vowels"] for one in kept)
    assert all(one["score"] == pytest.approx(sum(part["score"] for part in one["rewards"].values())) for one in kept)
    page = (tmp_path / "run" / "report.html").read_text()
    assert str(markupsafe.escape(kept[0]["rewards"]["numeric"]["reason"])) in page


def test_a_lost_score_is_kept_with_what_became_of_it(world, tmp_path):
    def half(prompts, responses):
        return [{"score": float(place), "reason": "place"} if place else math.nan for place, _ in enumerate(responses)]

    run(config_of(world, tmp_path / "run"), half)
    kept = [json.loads(one) for one in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert (kept[0]["score"], kept[0]["rewards"]["half"]["outcome"]) == (None, "not_finite")
    assert kept[1]["rewards"]["half"] == {"score": 1.0, "reason": "place"}


def test_a_reward_that_stands_still_is_told_while_it_does(world, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "LEAST", 0.01)
    events = tmp_path / "run" / "events.jsonl"

    def stalls(prompts, responses, answer):
        end = time.monotonic() + 20
        while not any(gives(line, "stalls") and gives(line, 8) for line in events.read_text().splitlines()):
            assert time.monotonic() < end
            time.sleep(0.01)
        return vowels(prompts, responses, answer)

    run(config_of(world, tmp_path / "run"), stalls)


def test_other_rewards_do_not_resume(world, tmp_path):
    config = config_of(world, tmp_path / "run", rewards=["json"])
    config["checkpoint"] = {"every": "1 steps"}
    run(config)
    config["duration"] = "4 steps"
    config["grpo"]["rewards"] = [{"name": "json", "weight": 2.0}]
    with raises_fault("SF-RESUME-CHANGED", "grpo.rewards"):
        run(config, resume=True)


def test_the_time_of_rollouts_has_their_name(world, tmp_path, monkeypatch):
    monkeypatch.setattr(footer, "_SHARE", 0.0)  # every part is listed
    said = io.StringIO()
    surefoot.train(config_of(world, tmp_path / "run"), reward=vowels, stream=said)
    (done,) = [line for line in said.getvalue().splitlines() if gives(line, "publishing")]
    assert (gives(done, "rollouts"), gives(done, "batches")) == (True, False)


@pytest.mark.parametrize("held", ["none", 2])
def test_a_record_without_the_right_answer_is_named(world, tmp_path, held):
    """Once for its file, also if records of it are held out; once for another file, which is the twin."""
    config = config_of(world, tmp_path / "run", rewards=[{"name": "numeric", "field": "solution"}])
    config["data"]["eval"] = held
    with raises_fault("SF-REWARD", f"{world / 'prompts.jsonl'}:1", remedy=[1, 2, 3, 4, 5]):
        run(config)
    config["data"]["eval"] = str(shutil.copy(world / "prompts.jsonl", tmp_path / "held.jsonl"))
    with raises_fault("SF-REWARD", f"{world / 'prompts.jsonl'}:1", also=[("SF-REWARD", f"{tmp_path}/held.jsonl:1")]):
        run(config)


def test_a_function_that_asks_for_an_unknown_field_is_refused_before_the_model_is_read(world, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def score(prompts, responses, answr):\n    return [0.0 for _ in responses]\n"
        "def right(prompts, responses, answer):\n    return [float(len(one)) for one in responses]\n"
    )
    config = config_of(world, tmp_path / "run", rewards=["json", f"{own}:score"])
    with pytest.MonkeyPatch.context() as patch, raises_fault("SF-OWN-FUNCTION", "grpo.rewards[1].name"):
        patch.setattr("surefoot.runs.steps.load_models", None)
        run(config, reward=None)
    config["grpo"]["rewards"] = [f"{own}:right"]
    run(config, reward=None)  # twin


@pytest.mark.parametrize(
    ("rewards", "unread"),
    [(["numeric"], []), (["numeric", {"name": "json", "field": "answer"}], []), (["json"], ["answer"])],
)
def test_fields_that_a_reward_reads_are_not_called_unread(world, tmp_path, rewards, unread):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config_of(world, tmp_path / "run", rewards=rewards)))
    done = CliRunner().invoke(main, ["data", str(path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["train"]["unused_fields"] == unread


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["batch.size=6"], "batch.size"),
        (["grpo.vllm_url=http://127.0.0.1:9"], "grpo.vllm_url"),
        (["grpo.engine=vllm"], "grpo.engine"),
        (["grpo.max_new_tokens=64"], "grpo.max_new_tokens"),
        (["grpo.engine=vllm", "grpo.vllm_url=http://127.0.0.1:9", "grpo.top_p=0.9"], "grpo.top_p"),
        (["grpo.correction_high=2"], "grpo.correction_high"),
        (["grpo.correction=token_mask", "grpo.correction_low=4"], "grpo.correction_low"),
        (["grpo.loss=rloo", "grpo.kl=0.1", "grpo.kl_by_ratio=true"], "grpo.kl_by_ratio"),
        (["grpo.rewards=[{name: numeric, convention: trl}]"], "grpo.rewards[0].convention"),
        (["ppo.kl=0.5"], "ppo.kl"),
    ],
)
def test_keys_that_exclude_each_other(world, tmp_path, changes, key):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config_of(world, tmp_path / "run")))
    with pytest.raises(InputError) as caught:
        load_config(path, changes)
    assert any(key in f"{fault.where} {fault.what}" for fault in caught.value.faults)
