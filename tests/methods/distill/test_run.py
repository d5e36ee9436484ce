"""Stage distill as a whole, on tiny models: what it writes, how it goes on after a kill, what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import surefoot
from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.killed import killed
from helpers.tiers import representatives
from helpers.tiny_models import llama3_tokenizer, tiny_llama
from helpers.vllm_answers import completion
from surefoot.methods.distill import teacher as teachers
from surefoot.models.modes import inference_mode
from surefoot.training import step as training_step

UNEQUAL = ("elapsed_time", "remaining_time", "throughput", "supervised_throughput", "peak_memory", "eval_runtime")
WORDS = ("one", "two", "heron", "sky", "trout", "answer")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    tiny_llama(folder / "base")
    tiny_llama(folder / "teacher", seed=1, layers=3)
    llama3_tokenizer(tiny_llama(folder / "stranger", seed=2), vocab_size=300)
    rows = [
        {"instruction": f"Say {word} {n} times.", "input": "", "output": " ".join([word] * (1 + n % 3))}
        for n, word in enumerate(WORDS * 3)
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(world: Path, output: Path, kind: str = "lora", teacher: str = "teacher", **distill) -> dict:
    return {
        "stage": "distill",
        "model": str(world / "base"),
        **({} if kind == "full" else {"adapter": {"kind": kind, "rank": 4}}),
        "data": {"train": str(world / "asked.jsonl"), "eval": 4, "max_length": 64},
        "distill": {"teacher": str(world / teacher), **distill},
        "batch": {"size": 4, "micro": 3},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "duration": "4 steps",
        "output": str(output),
    }


def run(config: dict, **how) -> list[dict]:
    surefoot.train(config, stream=io.StringIO(), **how)
    return rows_of(config)


def rows_of(config: dict) -> list[dict]:
    lines = (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()
    return [{name: value for name, value in row.items() if name not in UNEQUAL} for row in map(json.loads, lines)]


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("kind", "beta"),
    representatives([("lora", 0.0), ("lora", 0.5), ("lora", 1.0), ("full", 0.5)], ("lora", 0.0), ("full", 0.5)),
)
def test_a_teacher_that_is_the_student_teaches_exactly_nothing(world, tmp_path, kind, beta):
    """Not with DoRA, which divides weights by their norms and multiplies them again."""
    rows = run(config_of(world, tmp_path / "run", kind, "base", beta=beta))
    assert losses(rows) == [0.0] * 4
    assert [row["grad_norm"] for row in rows if "loss" in row] == [0.0] * 4
    assert rows[-1]["eval_loss"] == 0
    assert rows[-1]["eval_agreement"] == 1


@pytest.mark.parametrize("more", [{}, {"on_policy": 0.5, "max_new_tokens": 8}])
def test_noise_reaches_the_student(world, tmp_path, more):
    noisy = config_of(world, tmp_path / "run", "lora", "base", beta=0.5, **more)
    noisy["optim"]["neftune_alpha"] = 5.0
    assert min(losses(run(noisy))) > 0


def test_twin_a_teacher_that_drops_one_bit_is_seen(world, tmp_path, monkeypatch):
    real = teachers.hidden_at
    monkeypatch.setattr(teachers, "hidden_at", lambda *inputs: real(*inputs) * (1 + 2**-20))
    assert min(losses(run(config_of(world, tmp_path / "run", "lora", "base", beta=0.5)))) > 0


@pytest.mark.parametrize(("kind", "more"), [("lora", {}), ("full", {"beta": 0.5, "sft": 0.5, "temperature": 2.0})])
def test_a_student_comes_nearer_to_its_teacher(world, tmp_path, kind, more):
    config = config_of(world, tmp_path / "run", kind, **more)
    config |= {"duration": "16 steps", "eval_at_start": True}
    rows = run(config)
    first, *_, last = [row for row in rows if "eval_loss" in row]
    assert last["eval_loss"] < first["eval_loss"]
    assert ("divergence" in rows[1], "eval_divergence" in first) == (bool(more), bool(more))
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_cross_entropy"] == pytest.approx(last["eval_cross_entropy"])
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| teacher |" in card
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert plan["teacher"]["value"] == str(world / "teacher")


def test_micro_batches_change_nothing_but_rounding(world, tmp_path):
    configs = [config_of(world, tmp_path / str(micro), sft=0.2, beta=0.5) for micro in (4, 1)]
    for config, micro in zip(configs, (4, 1), strict=True):
        config["batch"]["micro"] = micro
    one, other = (losses(run(config)) for config in configs)
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("share", representatives([0.0, 0.5], 0.5))
def test_killed_it_goes_on_bit_for_bit(world, tmp_path, share):
    whole = config_of(world, tmp_path / "whole", beta=0.5)
    whole["distill"] |= {"on_policy": share, "max_new_tokens": 8} if share else {}
    whole |= {"checkpoint": {"every": "1 steps", "keep": 9}}
    cut = {**whole, "output": str(tmp_path / "cut")}
    wanted = run(whole)

    with killed(training_step, "accumulate_gradients", 3):
        run(cut)
    assert run(cut, resume=True) == wanted
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "cut")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_another_teacher_of_that_name_is_not_gone_on_with(world, tmp_path):
    tiny_llama(tmp_path / "teacher", seed=1, layers=3)
    config = config_of(tmp_path, tmp_path / "run") | {"model": str(world / "base")}
    config["data"]["train"] = str(world / "asked.jsonl")
    run(config)
    tiny_llama(tmp_path / "teacher", seed=5, layers=3)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    with raises_fault("SF-RESUME-CHANGED", checkpoint):
        run({**config, "duration": "6 steps"}, resume=True)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"teacher": "nowhere"}, "SF-FILE-MISSING"),
        ({"teacher": "stranger"}, "SF-TOKENIZER"),
        ({"teacher": "weightless"}, "SF-MODEL-WEIGHTS"),
        ({"beta": 1.5}, "SF-CONFIG-VALUE"),
        ({"sft": -1}, "SF-CONFIG-VALUE"),
    ],
)
def test_what_cannot_teach_is_one_line_at_its_key(world, tmp_path, change, code):
    weightless = world / "weightless"
    if not weightless.exists():
        tiny_llama(weightless)
        (weightless / "model.safetensors").unlink()
    (key,) = change
    with raises_fault(code, f"distill.{key}"):
        run(config_of(world, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def test_a_teacher_is_asked_for(world, tmp_path):
    config = config_of(world, tmp_path / "run")
    del config["distill"]["teacher"]
    with raises_fault("SF-CONFIG-CONFLICT", "distill.teacher"):
        run(config)


def test_a_teacher_needs_no_gradient_and_stays_as_it_is(world, tmp_path, monkeypatch):
    seen = []
    real = teachers.teacher_of

    def watched(model, *args, **named):
        seen.append((model, {name: one.clone() for name, one in model.state_dict().items()}))
        return real(model, *args, **named)

    monkeypatch.setattr(teachers, "teacher_of", watched)
    run(config_of(world, tmp_path / "run", "full"))
    ((model, before),) = seen
    assert not any(one.requires_grad for one in model.parameters())
    assert not model.training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    with inference_mode(model):
        assert not any(one.grad is not None for one in model.parameters())


def drawing(world: Path, output: Path, share: float = 0.5, **more) -> dict:
    """With room for few of the answers: prompts are long, and max_length is short."""
    config = config_of(world, output, on_policy=share, max_new_tokens=8, **more)
    config["data"]["max_length"] = 44
    return config


def test_a_share_of_the_answers_is_the_students_own(world, tmp_path):
    half, all_own = (run(drawing(world, tmp_path / str(share), share, sft=0.1)) for share in (0.5, 1.0))
    shares = [row["own_tokens"] for row in half if "loss" in row]
    assert 0 < sum(shares) / len(shares) < 1
    assert [row["own_tokens"] for row in all_own if "loss" in row] == [1.0] * 4
    own = [row for row in all_own if "loss" in row]
    assert [row["loss"] for row in own] == pytest.approx([row["divergence"] for row in own])  # no cross entropy


def test_a_teacher_that_is_the_student_has_nothing_to_say_of_its_answers(world, tmp_path):
    assert losses(run(drawing(world, tmp_path / "run", teacher="base", beta=1.0))) == [0.0] * 4


def test_draws_do_not_depend_on_micro_batches(world, tmp_path):
    configs = [drawing(world, tmp_path / str(micro)) for micro in (4, 1)]
    for config, micro in zip(configs, (4, 1), strict=True):
        config["batch"]["micro"] = micro
    one, other = (run(config) for config in configs)
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    assert [row.get("own_tokens") for row in one] == pytest.approx([row.get("own_tokens") for row in other])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"on_policy": 0.0}, "distill.max_new_tokens"),
        ({"engine": "vllm"}, "distill.engine"),
        ({"vllm_url": "http://127.0.0.1:9"}, "distill.vllm_url"),
        ({"max_new_tokens": 44}, "data.max_length"),
    ],
)
def test_keys_of_draws_that_contradict(world, tmp_path, change, key):
    config = drawing(world, tmp_path / "run")
    config["distill"] |= change
    with raises_fault("SF-CONFIG-CONFLICT", key):
        run(config)


def test_plain_texts_have_no_prompts_to_answer(world, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"A {word} is here."}) + "\n" for word in WORDS))
    config = drawing(world, tmp_path / "run")
    config["data"]["train"] = str(tmp_path / "texts.jsonl")
    with raises_fault("SF-CONFIG-CONFLICT", "distill.on_policy"):
        run(config)
    config = config_of(world, tmp_path / "run")  # the twin: their own tokens are learned from
    config["data"]["train"] = str(tmp_path / "texts.jsonl")
    assert min(losses(run(config))) > 0


def test_a_server_draws_the_answers_with_the_weights_of_each_step(world, tmp_path):
    asked = []

    def reply(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if path != "/inference/v1/generate":
            asked.append(path)
            return 200, "Success"
        ids = [40 + place for place in range(body["sampling_params"]["max_tokens"])]
        asked.append(body["sampling_params"]["temperature"])
        return 200, completion(ids, model=body["model"])

    with answering(reply) as stub:
        how = {"engine": "vllm", "vllm_url": stub.address, "sampling_temperature": 0.7}
        rows = run(drawing(world, tmp_path / "run", 1.0, **how))
    assert [row["own_tokens"] for row in rows if "loss" in row] == [1.0] * 4
    assert asked.count("/v1/load_lora_adapter") == 4
    assert asked.count(0.7) == 14  # of the epoch


def test_a_long_prompt_cuts_no_other_answer(world, tmp_path):
    """Each answer has all the room that its own prompt leaves within data.max_length."""
    asked = []

    def reply(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if path != "/inference/v1/generate":
            return 200, "Success"
        room = body["sampling_params"]["max_tokens"]
        asked.append((len(body["token_ids"]), room))
        return 200, completion([40] * room, model=body["model"])

    with answering(reply) as stub:
        config = drawing(world, tmp_path / "run", 1.0, engine="vllm", vllm_url=stub.address)
        config["data"]["max_length"] = 40
        run(config)
    drawn = [(length, room) for length, room in asked if length > 1]  # the others ask how it counts
    assert len(set(drawn)) > 2  # prompts of 32 to 35 tokens
    assert all(room == min(8, 40 - length) for length, room in drawn)


def test_a_loss_of_ones_own_is_refused_where_the_teacher_would_be_dropped(world, tmp_path):
    """Twin: stage sft takes it."""
    (tmp_path / "own.py").write_text(
        "from surefoot.methods.losses.sft import sft_loss\n\n\n"
        "def own(model, batch):\n    return sft_loss(model, batch)\n"
    )
    named = {"functions": {"loss": f"{tmp_path / 'own.py'}:own"}}
    with raises_fault("SF-CONFIG-CONFLICT", "functions.loss"):
        run(config_of(world, tmp_path / "run") | named)
    with raises_fault("SF-CONFIG-CONFLICT", "objective"):
        run(config_of(world, tmp_path / "run"), objective=lambda model, batch: None)
    assert not (tmp_path / "run").exists()
    twin = config_of(world, tmp_path / "twin") | named | {"stage": "sft"}
    del twin["distill"]
    assert run(twin)[-1]["current_steps"] == 4
