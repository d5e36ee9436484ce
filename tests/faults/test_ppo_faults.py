"""Faults of scores, answers and distance in stage ppo, through the command: what is left out, and when it ends (K1, K2,
K4, K5 and K8 of the catalogue). Every end is exit 5 or 4 with one line, and what is saved is finite."""

import json
import math

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from helpers.faults import gives
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.methods.ppo import holds
from surefoot.methods.ppo import memory as ppo_memory

PROMPTS = 24
SCORES = {  # `seen` counts the answers of the process
    "vowels": "vowels(text)",
    "never": "float('nan')",
    "infinite": "float('inf')",
    "every_third": "float('nan') if seen % 3 == 0 else vowels(text)",
    "every_thirtieth": "float('inf') if seen % 30 == 7 else vowels(text)",
    "the_same": "1.0",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    tiny_llama(folder / "base", pad=True)
    rows = [{"prompt": f"Say number {n}."} for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def score_file(folder, kind):
    lines = [
        "seen = 0",
        "def vowels(text):",
        "    return sum(letter in 'aeiou' for letter in text) / 4",
        "def score(prompts, responses):",
        "    global seen",
        "    found = []",
        "    for text in responses:",
        "        seen += 1",
        f"        found.append({SCORES[kind]})",
        "    return found",
    ]
    path = folder / f"{kind}.py"
    path.write_text("\n".join(lines) + "\n")
    return f"{path}:score"


def train(world, folder, kind="vowels", *arguments, base="base", steps=6, rate=1e-3, **ppo):
    """Exit code, the lines of the error, and the run folder."""
    config = {
        "stage": "ppo",
        "model": str(world / base),
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 64},
        "ppo": {"max_new_tokens": 4, "reward": score_file(folder, kind), **ppo},
        "batch": {"size": 8, "micro": 4},
        "optim": {"lr": rate, "warmup": 0.0},
        "precision": "fp32",
        "duration": f"{steps} steps",
        "checkpoint": {"every": "1 steps", "keep": 3, "best": "none"},
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["train", str(folder / "run.yaml"), *arguments])
    assert "Traceback" not in result.output
    errors = [line for line in result.output.splitlines() if line.startswith("error:")]
    for saved in (folder / "run").glob("checkpoint-*/*.safetensors"):
        assert all(bool(torch.isfinite(one.float()).all()) for one in load_file(saved).values())
    return result.exit_code, errors, folder / "run"


def rows_of(run):
    return [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", representatives(["never", "infinite"], "infinite"))
def test_k1_scores_that_are_never_finite_end_the_run_in_one_line(world, tmp_path, kind):
    code, errors, run = train(world, tmp_path, kind)
    assert (code, len(errors)) == (5, 1)
    assert errors[0].endswith("[SF-PPO]")
    assert all(gives(errors[0], value) for value in (8, 3, "ppo.reward"))
    assert all(row["skipped"] == "held" and row["loss"] is None for row in rows_of(run))


def test_k1_more_than_a_twentieth_without_a_score_ends_the_run_in_one_line(world, tmp_path):
    code, errors, _ = train(world, tmp_path, "every_third")
    assert (code, len(errors)) == (5, 1)
    assert errors[0].endswith("[SF-PPO]")
    assert all(gives(errors[0], value) for value in (10, 32))


def test_k1_a_rare_one_is_left_out_and_counted(world, tmp_path, monkeypatch):
    code, errors, run = train(world, tmp_path, "every_thirtieth")
    assert (code, errors) == (0, [])
    numbers = json.loads((run / "checkpoint-6" / "state.json").read_text())["stage"]
    assert (numbers["asked"], numbers["left_out"]) == (48, 2)
    assert not any("skipped" in row for row in rows_of(run))
    monkeypatch.setattr(holds, "FEWEST_LEFT_OUT", 1)  # the twin: 1 of 8 is more than a twentieth, too
    (tmp_path / "twin").mkdir()
    assert train(world, tmp_path / "twin", "every_thirtieth")[0] == 5


def test_k1_twin_without_the_share_the_run_goes_on(world, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_memory, "too_many_left_out", lambda *given: None)
    assert train(world, tmp_path, "every_third")[0] == 0


BOUNDS = {"ppo.kl_bound": "5.0", "ppo.ratio_bound": "10.0"}


def test_k2_a_rate_a_hundred_times_too_high_is_held_back_and_ends_the_run(world, tmp_path):
    code, errors, run = train(world, tmp_path, rate=1.0, epochs=4, steps=24, kl_bound=5.0)
    assert (code, len(errors)) == (5, 1)
    assert errors[0].endswith("[SF-PPO]")
    assert all(gives(errors[0], value) for value in (3, "optim.lr"))
    assert any(gives(errors[0], bound) and gives(errors[0], value) for bound, value in BOUNDS.items()), errors
    assert len((run / "events.jsonl").read_text().splitlines()) >= 3  # each of the three is an event


def test_k2_twin_at_a_usual_rate_nothing_is_held_back(world, tmp_path):
    code, _, run = train(world, tmp_path, epochs=4, steps=8, kl_bound=5.0)
    assert code == 0
    assert json.loads((run / "checkpoint-8" / "state.json").read_text())["stage"]["held"] == 0


@pytest.fixture(scope="module")
def silent_base(world):
    """A model that says nothing but its stop token: every hidden state is the same, and the head answers it so."""
    folder = world / "silent"
    tiny_llama(folder, pad=True)
    model = LlamaForCausalLM.from_pretrained(folder)
    stop = model.config.eos_token_id
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        hidden = model.model(torch.tensor([[1, 2, 3]])).last_hidden_state[0, -1]
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().weight[stop] = 50 * hidden / hidden.square().sum()
    model.save_pretrained(folder)
    return "silent"


def test_k4_a_model_that_only_stops_ends_the_run_in_one_line(world, silent_base, tmp_path):
    code, errors, run = train(world, tmp_path, base=silent_base)
    assert (code, len(errors)) == (5, 1)
    assert errors[0].endswith("[SF-PPO]")
    assert all(gives(errors[0], value) for value in (8, 3))
    rows = rows_of(run)
    assert all(row["response_length"] == 1 for row in rows)
    assert all(
        value is None or math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)
    )


def test_k5_one_score_for_all_answers_makes_no_nan_and_ends_the_run(world, tmp_path):
    code, errors, run = train(world, tmp_path, "the_same", whiten=True)
    assert (code, len(errors)) == (5, 1)
    assert errors[0].endswith("[SF-PPO]")
    assert gives(errors[0], 1)
    learned = [row for row in rows_of(run) if "skipped" not in row]
    assert learned
    assert all(math.isfinite(row["loss"]) and row["reward_std"] == 0 for row in learned)


def test_k8_another_reward_or_base_under_the_same_name_is_exit_4(world, tmp_path):
    assert train(world, tmp_path, steps=2)[0] == 0
    path = tmp_path / "vowels.py"

    def again():
        return CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--resume"])

    settings = yaml.safe_load((tmp_path / "run.yaml").read_text()) | {"duration": "3 steps"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    before = path.read_text()
    path.write_text(before.replace("/ 4", "/ 5"))
    result = again()
    assert result.exit_code == 4
    assert "[SF-RESUME-CHANGED]" in result.output
    assert gives(result.output, "ppo.reward")
    path.write_text(before)
    weights = world / "base" / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))  # of the policy's reference, too
        result = again()
        assert result.exit_code == 4, result.output
    finally:
        weights.write_bytes(kept)
    assert again().exit_code == 0
