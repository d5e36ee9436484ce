"""Stage ppo as a whole, on tiny models: what it writes, what it refuses, what is held back."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import gives
from helpers.tiers import representatives
from helpers.tiny_models import llama3_tokenizer, tiny_judge, tiny_llama
from helpers.toy_model import settings
from surefoot.config.load import load_config
from surefoot.data.batching.batch import Batch
from surefoot.data.batching.rollouts import Episode, episode_batches
from surefoot.families.files import TOKENIZER_FILES
from surefoot.methods.losses.ppo import PpoSettings, ppo_objective
from surefoot.methods.open_model import open_for_use
from surefoot.methods.open_reward import open_reward
from surefoot.methods.ppo import start as ppo_start
from surefoot.methods.ppo.memory import Average
from surefoot.methods.ppo.task import actor_logits, critic_values
from surefoot.methods.provenance import saved_plan
from surefoot.models.ppo_models import PPOModels, Role, ScoringRole
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.models.value_head import ScoredModel, ValueHead
from surefoot.report.verification import verify_folder
from surefoot.runs.output_folder import disk_of
from surefoot.system.errors import Diverged, Fault, InputError, SurefootError
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.engine import SingleEngine
from surefoot.training.manifest import read_manifest
from surefoot.training.optimizer import OptimizerSettings, make_optimizers, trainable_parameters
from surefoot.training.step import train_step

MERGED = 1e-5  # share of the largest logit: fp32 weights W + s B A in place of two products
HEADERS = 1.5  # of files as small as these
LORA = {"kind": "lora", "rank": 4}
KINDS = ["full", "lora"]
WHO_PLAYS = {  # policy, reward model: critic, reward model and reference
    ("full", "full"): ("model", "model", "model"),
    ("full", "lora"): ("adapter", "adapter", "adapter-off"),  # the reward model's base is the reference
    ("lora", "full"): ("adapter", "adapter-off", "adapter-off"),
    ("lora", "lora"): ("adapter", "adapter", "adapter-off"),
}

NUMBERS = ("loss", "kl", "ratio", "entropy", "policy_loss", "value_loss", "explained_variance", "grad_norm")
DRAWN = 1e-4  # three steps of AdamW over rounding errors of 1e-6 and less; other answers would differ by tenths


def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    tiny_llama(folder / "base")
    rows = [{"prompt": f"Say number {n}."} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"Say {n}.", "chosen": "a e i", "rejected": "b c d"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def config_of(world: Path, output: Path, kind: str = "full", **ppo) -> dict:
    return {
        "stage": "ppo",
        "model": str(world / "base"),
        **({} if kind == "full" else {"adapter": LORA}),
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 64},
        "ppo": {"max_new_tokens": 8, **ppo},
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "precision": "fp32",
        "duration": "3 steps",
        "output": str(output),
    }


def run(config: dict, reward=vowels) -> tuple[list[dict], str]:
    """Train rows, and what was said."""
    said = io.StringIO()
    surefoot.train(config, reward=reward, stream=said)
    lines = (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row], said.getvalue()


@pytest.mark.parametrize("kind", representatives(KINDS, "lora"))
def test_a_run_writes_policy_critic_and_average_and_logs_its_numbers(world, tmp_path, kind):
    config = config_of(world, tmp_path / "run", kind, ema=0.5)
    config["data"]["eval"] = str(world / "prompts.jsonl")
    rows, said = run(config)
    names = {"reward", "reward_std", "kl", "kl_coef", "entropy", "ratio", "clip_fraction", "policy_loss", "value_loss"}
    names |= {"response_length", "ended", "explained_variance", "grad_norm_actor", "grad_norm_critic"}
    assert all(names <= row.keys() for row in rows)
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert re.search(r"\b(1\.0000|0\.9999)\d\d\b", said)  # to the log-probabilities of the engine, before step 1
    weights = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    for folder in ("", "critic", "ema"):
        assert (tmp_path / "run" / folder / weights).is_file()
        assert (tmp_path / "run" / folder / "tokenizer.json").is_file()
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_loss"] == -results["eval_reward"]
    critic = open_reward(str(tmp_path / "run" / "critic"))
    assert critic.model.v_head.summary.weight.any()
    end = said.partition("done: 3 steps")[2]
    for row, when in ((rows[0], "first"), (rows[-1], "last")):
        names = ("reward", "kl", "response_length")
        assert [results[f"train_{when}_{name}"] for name in names] == [row[name] for name in names]
        (line,) = [line for line in end.splitlines() if line.startswith(f"{when} rollout")]
        assert all(number in line for number in (f"{row['reward']:.4g}", f"{row['response_length']:.1f} tokens"))
    assert all(f"  {folder}/ " in end for folder in ("critic", "ema"))


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 24)[None]).logits


@pytest.fixture(scope="module")
def merged(world, tmp_path_factory):
    """A run with a moving average that publishes whole models."""
    config = config_of(world, tmp_path_factory.mktemp("merged") / "run", "lora", ema=0.5)
    config["adapter"] = LORA | {"publish": "merged"}
    config["optim"]["lr"] = 0.02
    run(config)
    return Path(config["output"])


def test_where_the_policy_is_published_merged_so_is_its_average(merged):
    for place in ("", "ema"):
        assert not (merged / place / "adapter_config.json").exists()
        assert (merged / place / "export.json").is_file()
        wanted = logits_of(open_for_use(str(merged / "checkpoint-3" / place)).model)
        found = logits_of(AutoModelForCausalLM.from_pretrained(merged / place))
        assert (found - wanted).abs().max() <= MERGED * wanted.abs().max()
    assert (logits_of(AutoModelForCausalLM.from_pretrained(merged)) - found).abs().max() > 10 * MERGED  # twin
    assert {"ema/model.safetensors", "ema/tokenizer.json"} <= read_manifest(merged)["files"].keys()
    assert not {"ema/adapter_model.safetensors", "adapter_config.json"} & read_manifest(merged)["files"].keys()
    assert verify_checkpoint(merged) == []
    assert open_for_use(str(merged / "ema")).plan is not None  # known as the run's
    assert not [fault for place in ("", "ema") for check in verify_folder(merged / place) for fault in check.faults]


def test_the_disk_is_forecast_with_critic_and_average(merged):
    config, plan = load_config(merged / "config.yaml").config, saved_plan(merged)
    assert plan is not None

    def weights(folder: Path) -> int:
        """And tokenizers."""
        files = [*folder.rglob("*.safetensors"), *(one for name in TOKENIZER_FILES for one in folder.rglob(name))]
        return sum(file.stat().st_size for file in files)

    forecast = disk_of(config, plan)
    lies = weights(merged / "checkpoint-3")
    assert forecast.checkpoint <= lies <= HEADERS * forecast.checkpoint
    whole = (merged / "model.safetensors").stat().st_size
    published = weights(merged) - lies
    assert forecast.model <= published + whole <= HEADERS * forecast.model  # one more in the folder it is compared in
    without = config.model_copy(update={"ppo": config.ppo.model_copy(update={"ema": None})})
    assert HEADERS * disk_of(without, plan).model < published + whole  # twin


def test_the_average_is_that_of_the_weights_after_each_step(world, tmp_path):
    config = config_of(world, tmp_path / "run", ema=0.75)
    config["checkpoint"] = {"every": "1 steps", "keep": 3}
    run(config)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = load_file(world / "base" / "model.safetensors")[name]
    for step in (1, 2, 3):
        weights = load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")[name]
        expected = torch.lerp(expected, weights, 0.25)
        average = load_file(tmp_path / "run" / f"checkpoint-{step}" / "ema" / "model.safetensors")[name]
        assert torch.equal(average, expected)
        assert not torch.equal(average, weights)


def test_an_average_leaves_the_weights_alone():
    model = nn.Linear(3, 3)
    average = Average(dict(model.named_parameters()), 0.9)
    with torch.no_grad():
        model.weight += 1
    before = model.weight.detach().clone()
    average.update()
    with average.in_place():
        assert torch.allclose(model.weight, before - 0.9)
    assert torch.equal(model.weight, before)


def test_a_run_repeats_bit_for_bit_and_another_seed_draws_otherwise(world, tmp_path):
    rows = [run(config_of(world, tmp_path / name) | {"seed": seed})[0] for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    losses = [[row["loss"] for row in found] for found in rows]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize(("policy", "scorer"), representatives(WHO_PLAYS, ("lora", "full")))
def test_a_reward_model_scores_as_it_does_by_itself_and_the_critic_begins_as_it(world, tmp_path, policy, scorer):
    reward = {
        "stage": "reward",
        "model": str(world / "base"),
        **({} if scorer == "full" else {"adapter": LORA}),
        "data": {"train": str(world / "pairs.jsonl"), "max_length": 64},
        "optim": {"lr": 1e-2},
        "batch": {"size": 6},
        "precision": "fp32",
        "duration": "4 steps",
        "output": str(tmp_path / "reward"),
    }
    surefoot.train(reward, stream=io.StringIO())
    config = config_of(world, tmp_path / "run", policy, reward=str(tmp_path / "reward"), critic_lr=1e-12)
    config["data"]["eval"] = str(world / "prompts.jsonl")
    config |= {"samples": {"count": 12, "max_new_tokens": 8}, "duration": "1 steps"}
    run(config, reward=None)
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    opened, critic = open_reward(str(tmp_path / "reward")), open_reward(str(tmp_path / "run" / "critic"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert results["eval_reward"] != 0
    ids = torch.randint(5, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.full_like(ids, -100), None, 0, (9,), (0,))
    with torch.no_grad():
        torch.testing.assert_close(critic.model.values(batch), opened.model.values(batch), rtol=1e-4, atol=1e-5)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]["ppo"]
    assert tuple(plan[part]["value"] for part in ("critic", "reward", "reference")) == WHO_PLAYS[policy, scorer]


def failing(world, output: Path, function, error: type[SurefootError] = Diverged, **ppo) -> Fault:
    with pytest.raises(error) as raised:
        run(config_of(world, output, **ppo), function)
    return raised.value.faults[0]


@pytest.mark.parametrize(
    ("reward", "patience", "step"),
    [
        (lambda prompts, responses: [1.0] * len(responses), 1, "step 2"),
        (lambda prompts, responses: [float("nan")] * len(responses), 3, "step 3"),
    ],
)
def test_a_reward_that_says_nothing_ends_the_run(world, tmp_path, reward, patience, step):
    fault = failing(world, tmp_path / "run", reward, patience=patience)
    assert (fault.code, fault.where) == ("SF-PPO", step)


def checkpoints(folder: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in range(1, steps + 1)]


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_held_steps_move_nothing_and_say_why(world, tmp_path):
    asked = []

    def at_first(prompts, responses):
        asked.append(1)
        return vowels(prompts, responses) if len(asked) == 1 else [float("nan")] * len(responses)

    config = config_of(world, tmp_path / "run")
    config["checkpoint"] = {"every": "1 steps", "keep": 3, "best": "none"}
    rows, said = run(config, at_first)
    assert [row.get("skipped") for row in rows] == [None, "held", "held"]
    first, second, third = checkpoints(tmp_path / "run", 3)
    assert not moved(first, second)
    assert not moved(second, third)
    assert moved(load_file(world / "base" / "model.safetensors"), first)  # the twin
    held = [line for line in said.splitlines() if "step 2: " in line]
    assert any(gives(line, 4) for line in held), said


def test_a_policy_too_far_away_is_pulled_back_whatever_it_scores(world, tmp_path):
    config = config_of(world, tmp_path / "run", kl=2.0, kl_bound=1e-9, patience=9) | {"duration": "4 steps"}
    config["checkpoint"] = {"every": "1 steps", "keep": 4, "best": "none"}
    rows, said = run(config)
    far = [row["current_steps"] for row in rows if row["kl"] > 1e-9 and row["current_steps"] > 1]
    assert far  # the first has no distance
    assert all(f"step {step}: " in said for step in far)
    weights = checkpoints(tmp_path / "run", 4)
    assert all(moved(weights[step - 2], weights[step - 1]) for step in far)
    assert not any(row.get("skipped") for row in rows)


def test_one_bad_score_is_left_out_and_the_others_are_learned_from(world, tmp_path):
    def sometimes(prompts, responses):
        return [float("nan"), *vowels(prompts[1:], responses[1:])]

    rows, said = run(config_of(world, tmp_path / "run"), sometimes)
    assert [row.get("skipped") for row in rows] == [None] * 3
    left_out = re.findall(r"step \d+: (\d+) ", said)
    assert left_out
    assert set(left_out) == {"1"}


def test_what_scores_is_refused_in_one_line(world, tmp_path):
    for change, function, where in (
        ({}, None, "ppo.reward"),
        ({"reward": "score.py:f"}, vowels, "reward"),
        ({"reward": "nowhere.py:f"}, None, "ppo.reward"),
    ):
        assert failing(world, tmp_path / "run", function, InputError, **change).where == where


def test_a_reward_for_another_stage_is_refused(world, tmp_path):
    config = config_of(world, tmp_path / "run") | {"stage": "sft"}
    del config["ppo"]
    with pytest.raises(InputError) as raised:
        run(config)
    assert raised.value.faults[0].where == "reward"


def test_another_tokenizer_is_refused(world, tmp_path):
    other = tmp_path / "other"
    tiny_judge(other)
    llama3_tokenizer(other, vocab_size=300)
    fault = failing(world, tmp_path / "run", None, InputError, reward=str(other))
    assert (fault.code, fault.where) == ("SF-TOKENIZER", "ppo.reward")


def step_norms(world: Path, scale: float, *, together: bool) -> dict[str, torch.Tensor]:
    """The actor's weights after one step whose critic has returns of size `scale`; SGD at rate 1, clipped to 1e-3."""
    actor, critic, reference = (AutoModelForCausalLM.from_pretrained(world / "base") for _ in range(3))
    head = ValueHead(32)
    nn.init.ones_(head.summary.weight)
    cast = PPOModels(actor=Role(actor), critic=ScoringRole(ScoredModel(critic, head)), reference=Role(reference))
    parameters = trainable_parameters(cast)
    names = {"actor": cast.actor_parameters, "critic": cast.critic_parameters}
    if together:
        names = {"actor": frozenset(parameters)}
    groups = {group: {name: parameters[name] for name in own} for group, own in names.items()}
    sgd = OptimizerSettings("sgd", (0.9, 0.999), None, 1e-8, 0.0)
    optimizer = make_optimizers(groups, dict.fromkeys(groups, sgd), decoder=frozenset())
    engine = SingleEngine(cast, parameters, optimizer, groups)
    ones = torch.ones(3)
    episodes = [Episode(0, (5, 6), (7, 8, 9), 0, -5.8 * ones, 0 * ones, ones, scale * ones)]
    objective = ppo_objective(PpoSettings(0.2, None), actor_logits, critic_values)
    batches = episode_batches(episodes, 1, 0)
    rate = dict.fromkeys(groups, 1.0)
    train_step(engine, objective, batches, step=1, lr=rate, scale=None, settings=settings(max_grad_norm=1e-3))
    return {name: one.detach() for name, one in actor.named_parameters()}


@pytest.mark.parametrize("together", [False, True])
def test_actor_and_critic_never_clip_each_other(world, together):
    """together: the twin, in which one norm clips both."""
    small, large = (step_norms(world, scale, together=together) for scale in (1.0, 1e4))
    assert all(torch.equal(small[name], large[name]) for name in small) == (not together)


@pytest.fixture
def weighings(monkeypatch) -> list[int]:
    """Response tokens of each pass in which the actor weighs answers without learning from them."""
    found: list[int] = []
    logits_at = PPOModels.actor_logits_at

    def counted(cast, batch, places):
        if not torch.is_grad_enabled():
            found.append(len(places))
        return logits_at(cast, batch, places)

    monkeypatch.setattr(PPOModels, "actor_logits_at", counted)
    return found


@pytest.mark.parametrize(("kind", "temperature"), representatives(product(KINDS, [1.0, 0.7]), ("lora", 0.7)))
def test_the_actor_weighs_the_first_answers_alone_and_numbers_stay(
    world, tmp_path, kind, temperature, weighings, monkeypatch
):
    kept, _ = run(config_of(world, tmp_path / "kept", kind, temperature=temperature))
    assert len(weighings) == 2  # the micro-batches of the first rollout; there are three rollouts
    monkeypatch.setattr(ppo_start, "drawn_suffice", lambda *_: False)
    anew, _ = run(config_of(world, tmp_path / "anew", kind, temperature=temperature))
    assert len(weighings) == 2 + 6
    for one, other in zip(kept, anew, strict=True):
        assert {name: one[name] for name in NUMBERS} == pytest.approx(
            {name: other[name] for name in NUMBERS}, rel=DRAWN, abs=DRAWN
        )


@pytest.mark.parametrize(
    "change", representatives(["another precision", "an engine that rounds"], "an engine that rounds")
)
def test_twin_answers_are_weighed_anew_where_drawn_numbers_are_not_those_that_learn(
    world, tmp_path, change, weighings, monkeypatch
):
    config = config_of(world, tmp_path / "run")
    if change == "another precision":
        config["precision"] = "bf16"
    else:
        answer = EmbeddedRollouts.answer

        def rounded(engine, *asked):
            return [
                replace(one, logprobs=tuple(round(number, 3) for number in one.logprobs or ()))
                for one in answer(engine, *asked)
            ]

        monkeypatch.setattr(EmbeddedRollouts, "answer", rounded)
    run(config)
    assert len(weighings) == 6
