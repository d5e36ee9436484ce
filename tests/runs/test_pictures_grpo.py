"""Stage grpo on pictures: greedy answers, log-probabilities, first loss and gradients of plain transformers in each
family; exact resume; what is refused."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import surefoot
from helpers.faults import raises_fault
from helpers.prepared import prepared
from helpers.seeing import noise
from helpers.seen_by_transformers import QWEN, SEEING, Question, Seen, base_of, question
from helpers.tiers import representatives
from runs.test_pictures_judged import assert_gradients
from runs.test_pictures_run import config, opened, trained_and_resumed
from surefoot.data.batching.groups import GroupEpisode, group_batches
from surefoot.data.batching.loader import Layout
from surefoot.evaluate.answers import pair_records
from surefoot.method_facts.losses import GROUP_LOSSES
from surefoot.methods.grpo import answering, memory
from surefoot.methods.losses.grpo import GroupSettings, group_objective
from surefoot.methods.losses.logprobs import drawn_logprobs
from surefoot.methods.rollouts import answered_batches, prompts_at, shown_of
from surefoot.models import rollout
from surefoot.models.generate import Decoding
from surefoot.models.load import load_tokenizer
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.system.errors import SurefootError

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
# Of single log-probabilities, which weights three times as large as drawn at random make as low as -30.
LOGPROBS = 3e-4
TOKENS, KL = 6, 0.1
SEED = 4  # Gemma 3n has few embeddings for sounds here, and may not draw the others'
EACH = representatives(SEEING, "qwen2_5_vl")


def asked(folder: Path) -> list[Question]:
    """Two with the same ids, one to two pictures, one to none."""
    sizes = {"grain": (56, 56), "sand": (56, 56), "snow": (84, 56)}
    grain, sand, snow = (noise(folder / f"{name}.png", size) for name, size in sizes.items())
    return [question("what?", grain), question("what?", sand), question("which?", snow, grain), question("and now?")]


def prompts_of(folder: Path, base: Path, questions: list[Question]):
    (folder / "d.json").write_text(json.dumps([one.record() for one in questions]))
    tokenizer = load_tokenizer(base)
    return prepared(folder / "d.json", tokenizer, folder / "cache", kind="prompts", max_length=4096).train


def answers(model, data, where: list[int], temperature: float, rows: int = 8):
    """Of the policy's own engine, and what it was asked."""
    prompts, own = prompts_at(data, where), range(len(where))
    decoding = Decoding(TOKENS, {-1}, 0, temperature, seed=SEED, among_kept=True)
    shown = shown_of(prompts.ids, prompts.pictures, own, data.processor)
    return EmbeddedRollouts(model, rows).answer(prompts.ids, decoding, own, shown=shown), prompts


@pytest.mark.parametrize("name", EACH)
def test_greedy_answers_are_transformers_own(tmp_path, name):
    """Two to each prompt, which share its pictures."""
    base, questions = base_of(name, tmp_path / "base", lively=True), asked(tmp_path)
    model, theirs = opened(base).eval(), Seen(name, base)
    data = prompts_of(tmp_path, base, questions)
    where = [0, 0, 1, 1, 2, 2, 3, 3]
    found, _ = answers(model, data, where, 0.0)
    wanted = [theirs.greedy(one, TOKENS, -1) for one in questions]
    assert [list(one.response) for one in found] == [wanted[place] for place in where]


def positions_of_texts(model):
    """Right in the prompt, and as many as there are tokens behind it."""
    whole = type(model.model).compute_3d_position_ids

    def found(self, *given, past_key_values=None, **named):
        if past_key_values is not None and past_key_values.get_seq_length():
            return None
        return whole(self, *given, past_key_values=past_key_values, **named)

    return found


def assert_close(found: list, wanted: list) -> None:
    assert max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)) <= LOGPROBS


@pytest.mark.parametrize("name", EACH)
def test_log_probabilities_loss_and_gradients_are_transformers_own(tmp_path, name, monkeypatch):
    """Of the engine that draws, the pass before the first update, and the step; the reference is another model."""
    base, questions = base_of(name, tmp_path / "base", lively=name in QWEN), asked(tmp_path)
    model, theirs, before = opened(base), Seen(name, base), Seen(name, base)
    torch.manual_seed(0)
    for key, one in theirs.model.named_parameters():
        if key in {key for key, own in model.named_parameters() if own.requires_grad}:
            one.data += 0.02 * torch.randn_like(one)
    model.load_state_dict(theirs.model.state_dict())
    data, where = prompts_of(tmp_path, base, questions), [0, 0, 1, 1, 2, 2, 3, 3]
    found, prompts = answers(model.eval(), data, where, 1.0)
    model.train()
    known = [theirs.drawn(questions[place], one.response) for place, one in zip(where, found, strict=True)]
    drawn = [torch.tensor(one.logprobs) for one in found]
    assert_close(drawn, known)

    def passed(pictures) -> list[torch.Tensor]:
        rows: dict[int, torch.Tensor] = {}
        for batch in answered_batches(found, Layout(0, most=3), pictures, data.processor):
            with torch.no_grad():
                own = drawn_logprobs(model, batch, 1.0, None).tokens
            rows |= dict(zip(map(int, batch.examples), own.reshape(-1, TOKENS), strict=True))
        return [rows[place] for place in range(len(found))]

    assert_close(passed(prompts.pictures), known)
    with torch.no_grad():
        reference = [before.drawn(questions[place], one.response) for place, one in zip(where, found, strict=True)]
    advantages = [1.0, -0.5, 0.25, -1.0, 0.75, -0.25, 0.5, -0.75]
    terms = [
        -(own - own.detach()).exp() * advantage + KL * ((other - own).exp() - 1 - (other - own))
        for own, other, advantage in zip(known, reference, advantages, strict=True)
    ]
    wanted = torch.stack([one.mean() for one in terms]).sum()
    wanted.backward()
    episodes = [
        GroupEpisode(
            place // 2, place % 2, one.prompt, one.response, prompts.records[place], advantages[place], True,
            drawn[place], reference[place], source=prompts.where[place],
        )
        for place, one in enumerate(found)
    ]  # fmt: skip
    objective = group_objective(GroupSettings(GROUP_LOSSES["grpo"], 0.2, 0.2, kl=KL, temperature=1.0, limit=TOKENS))

    def loss(pictured) -> torch.Tensor:
        batches = group_batches(episodes, Layout(0, most=3), of_tokens=False, data=pictured)
        assert sum(one.weight for one in batches) == len(episodes)
        return torch.stack([objective(model, one).loss for one in batches]).sum()

    ours = loss(data)
    ours.backward()
    assert ours.item() == pytest.approx(wanted.item(), abs=LOGPROBS)
    assert_gradients(model, theirs.model, LOGPROBS)
    if name not in QWEN:
        return
    # twins: pixels of another picture; two pictures of one prompt change places; positions behind pictures of texts
    others = [prompts.pictures[(place + 2) % 4] for place in range(4)]
    turned = [own[::-1] for own in prompts.pictures]
    for twin in ([*others, *prompts.pictures[4:]], turned):
        with pytest.raises(AssertionError):
            assert_close(passed(twin), known)
    monkeypatch.setattr(type(model.model), "compute_3d_position_ids", positions_of_texts(model))
    wrong, _ = answers(model.eval(), data, where, 1.0)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_close(
            [torch.tensor(one.logprobs) for one in wrong],
            [theirs.drawn(questions[place], one.response) for place, one in zip(where, wrong, strict=True)],
        )


def records_of(folder: Path) -> list[dict]:
    """As `asked`, each with a field of its own; the pictures lie beside them."""
    asked(folder)
    shown = {"grain": ["grain.png"], "sand": ["sand.png"], "both": ["snow.png", "grain.png"], "none": []}
    rows = [
        {"prompt": [{"role": "user", "content": "<image>" * len(own) + "what?"}], "images": own, "answer": name}
        for name, own in shown.items()
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    return rows


TOOL = """
class Tool:
    def reset(self, record):
        return None

    def step(self, answer):
        return {"observation": "b", "done": True}
"""
REWARD = """
import json

def letters(prompts, responses, answer, images):
    assert all(len(shown) == {"none": 0, "both": 2}.get(name, 1) for name, shown in zip(answer, images, strict=True))
    both = zip(answer, responses, strict=True)
    return [sum(letter in name for letter in text) / 4 + len(text) % 5 for name, text in both]
"""


def grpo_config(folder: Path, run: str) -> dict:
    (folder / "score.py").write_text(REWARD)
    raw = config(folder, run, stage="grpo", adapter={"kind": "lora", "rank": 2}, batch={"size": 4, "micro": 3})
    raw["grpo"] = {"rewards": [f"{folder / 'score.py'}:letters"], "group": 2, "max_new_tokens": TOKENS, "kl": 0.1}
    raw["grpo"] |= {"epochs": 3}  # a checkpoint stands inside a cycle
    raw["data"] |= {"eval": 2, "max_length": 512}
    return raw | {"samples": {"count": 2}}


@pytest.mark.parametrize("ahead", representatives([0, 1], 0))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, ahead):
    base_of("qwen2_5_vl", tmp_path / "base", lively=True)
    records_of(tmp_path)
    raw = grpo_config(tmp_path, "whole")
    raw["grpo"] |= {"ahead": ahead}
    trained_and_resumed(raw, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "trainer_log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=LOGPROBS)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=LOGPROBS)  # the reference sees what the policy sees
    assert steps[0]["mismatch"] <= LOGPROBS  # and the engine, at its positions
    audit = json.loads((tmp_path / "whole" / "data.json").read_text())
    assert audit["train"]["pictures"]["count"] + audit["eval"]["pictures"]["count"] == 8
    assert Path(audit["to_try"]["picture"]).stem in ("grain", "sand", "snow")
    shown = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert any(".png" in json.dumps(one) for one in shown)
    assert not any("<|image_pad|>" in json.dumps(one) for one in shown)


@pytest.mark.slow
def test_twin_a_checkpoint_without_the_pictures_of_its_answers(tmp_path, monkeypatch):
    base_of("qwen2_5_vl", tmp_path / "base", lively=True)
    records_of(tmp_path)
    whole = memory.groups_from_tensors
    forgetful = lambda tensors, numbers: whole({**tensors, "sources": tensors["sources"] * 0}, numbers)  # noqa: E731
    monkeypatch.setattr(memory, "groups_from_tensors", forgetful)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        trained_and_resumed(grpo_config(tmp_path, "whole"), tmp_path)


@pytest.mark.parametrize("key", ["grpo.environment", "grpo.engine"])
def test_turns_and_servers_refuse_pictures(tmp_path, key):
    base_of("qwen2_5_vl", tmp_path / "base")
    records_of(tmp_path)
    raw = grpo_config(tmp_path, "run")
    (tmp_path / "tool.py").write_text(TOOL)
    raw["grpo"] |= {
        "grpo.environment": {"environment": f"{tmp_path / 'tool.py'}:Tool"},
        "grpo.engine": {"engine": "vllm", "vllm_url": "http://127.0.0.1:9"},
    }[key]
    with raises_fault("SF-DATA-PICTURE", key):
        surefoot.train(raw, stream=io.StringIO())
    rows = [{"prompt": "a", "answer": "b"}] * 8  # twin: without pictures this is not what is refused
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    codes: set[str] = set()
    try:
        surefoot.train(raw | {"duration": "1 step"}, stream=io.StringIO())
    except SurefootError as error:
        codes = {fault.code for fault in error.faults}
    assert "SF-DATA-PICTURE" not in codes


def test_a_rank_that_has_nothing_to_see_sees_with_the_others(tmp_path):
    """Its vision tower runs while theirs do, and only then."""
    base, questions = base_of("qwen2_5_vl", tmp_path / "base"), asked(tmp_path)
    model, data = opened(base).eval(), prompts_of(tmp_path, base, questions)
    prompts, ran = prompts_at(data, range(4)), []
    model.model.visual.register_forward_hook(lambda *given: ran.append(1))
    shown = shown_of(prompts.ids, prompts.pictures, [3], data.processor)
    assert shown is not None
    # For each batch: is there one, has it pictures, two steps.
    own = [True, False, True, True]
    for told, wanted in (([True, True, True, True, *own, False], 1), ([*own, False], 0)):
        left, ran[:] = iter(told), []
        engine = EmbeddedRollouts(model, 8, keep_going=lambda going, left=left: next(left))
        engine.answer([prompts.ids[3]], Decoding(2, {-1}, 0), [3], shown=shown)
        assert sum(ran) == wanted
        assert not list(left)


def test_the_token_of_a_picture_is_not_drawn_where_there_are_pictures(tmp_path, monkeypatch):
    base, questions = base_of("qwen2_5_vl", tmp_path / "base"), asked(tmp_path)
    model, data, never = opened(base).eval(), prompts_of(tmp_path, base, questions), []
    whole = rollout.draw_steps
    spied = lambda model, prompts, how, **named: never.append(how.never) or whole(model, prompts, how, **named)  # noqa: E731
    monkeypatch.setattr(rollout, "draw_steps", spied)
    answers(model, data, [0, 3], 1.0)
    assert never == [(data.processor.token_id,)] * 2  # its pictures and a text, which are learned together
    never.clear()
    answers(model, data, [3], 1.0)
    assert never == [()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["reward", "kto", "grpo"])
@pytest.mark.parametrize("name", SEEING)
def test_each_family_trains(tmp_path, name, stage):
    """Whole runs, whose plan, checks and first loss are those of any other."""
    base_of(name, tmp_path / "base")
    if stage == "grpo":
        records_of(tmp_path)
    raw = grpo_config(tmp_path, "run") if stage == "grpo" else config(tmp_path, "run", stage=stage)
    if stage != "grpo":
        said = {"chosen": "red", "rejected": "blue"} if stage == "reward" else {"completion": "red"}
        rows = [one.record(**said, label=place % 2 == 0) for place, one in enumerate(asked(tmp_path))]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw |= {"duration": "2 steps", "adapter": {"kind": "lora", "rank": 2}, "seed": SEED}
    raw["data"] |= {"max_length": 512}
    surefoot.train(raw, stream=io.StringIO())
    rows = [json.loads(line) for line in (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "loss" in row)
    if stage == "grpo":
        assert (first["kl"], first["ratio"]) == (pytest.approx(0, abs=LOGPROBS), pytest.approx(1, abs=LOGPROBS))
        assert first["mismatch"] <= LOGPROBS
    else:
        assert first["loss"] == pytest.approx({"reward": math.log(2), "kto": 0.5}[stage], abs=LOGPROBS)


def test_equal_ids_with_other_pictures_are_other_prompts(tmp_path):
    base, questions = base_of("qwen2_5_vl", tmp_path / "base", lively=True), asked(tmp_path)
    data = prompts_of(tmp_path, base, questions)
    found, prompts = answers(opened(base).eval(), data, [0, 1, 0, 1], 0.0, rows=3)
    assert prompts.ids[0] == prompts.ids[1]
    assert found[0].response == found[2].response != found[1].response == found[3].response


@pytest.mark.slow
def test_a_reward_model_sees_the_pictures_of_the_prompts(tmp_path, monkeypatch):
    """Its scores are those of plain transformers; one that reads pictures otherwise is refused."""
    base = base_of("qwen2_5_vl", tmp_path / "base", lively=True)
    rows = [one.record(chosen="a", rejected="b c") for one in asked(tmp_path)[:3]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = config(tmp_path, "reward", stage="reward", adapter={"kind": "lora", "rank": 2}, duration="2 steps")
    raw["data"] |= {"eval": "none"}
    surefoot.train(raw, stream=io.StringIO())
    records_of(tmp_path)
    scored = []
    whole = answering.model_scores

    def spied(model, answers, pictures, how):
        found = whole(model, answers, pictures, how)
        scored.extend(zip(answers, pictures, found, strict=True))
        return found

    monkeypatch.setattr(answering, "model_scores", spied)
    raw = grpo_config(tmp_path, "run") | {"duration": "1 step"}
    raw["grpo"] |= {"rewards": [str(tmp_path / "reward")], "epochs": 1}
    surefoot.train(raw, stream=io.StringIO())
    head = load_file(tmp_path / "reward" / "value_head.safetensors")["v_head.summary.weight"][0]
    theirs = Seen("qwen2_5_vl", base)
    theirs.model = PeftModel.from_pretrained(theirs.model, str(tmp_path / "reward")).eval()
    assert any(shown for _, shown, _ in scored)
    for answer, shown, score in scored:
        turned = Question("what?", tuple(Path(one.path) for one in shown), first=True)
        assert theirs.inputs(turned)["input_ids"][0].tolist() == list(answer.prompt)
        with torch.no_grad():
            wanted = float(theirs.state(turned, answer.response) @ head)
        assert score == pytest.approx(wanted, abs=LOGPROBS)
    path = base_of("qwen2_5_vl", tmp_path / "other") / "preprocessor_config.json"  # a policy that reads them otherwise
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rescale_factor": 0.5}))
    raw["model"] = str(tmp_path / "other")
    with raises_fault("SF-DATA-PICTURE", "grpo.rewards[0].name"):
        surefoot.train(raw | {"output": str(tmp_path / "refused")}, stream=io.StringIO())


def test_answers_become_pairs_with_the_pictures_of_their_prompts(tmp_path):
    """Also from another folder than that of the prompts."""
    base = base_of("qwen2_5_vl", tmp_path / "base")
    records_of(tmp_path)
    tokenizer = load_tokenizer(base)
    prompts = prepared(tmp_path / "d.jsonl", tokenizer, tmp_path / "c", kind="prompts").train.subset(range(4))
    drawn = [{"ended": True, "answer": text, "score": score} for text, score in (("good", 1.0), ("bad", 0.0))]
    measured: Any = SimpleNamespace(results={"base": SimpleNamespace(sizes=[2], kept=drawn * 4)}, prompts=prompts)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pairs.json").write_text(json.dumps(list(pair_records(measured))))
    pairs = prepared(tmp_path / "out" / "pairs.json", tokenizer, tmp_path / "c", kind="pairs").train
    assert len(pairs) == 2 * len(prompts)
    for place in range(len(prompts)):
        better = pairs[2 * place]
        found = seen_in(better.ids[: int(better.supervised.argmax())], better.pictures)
        assert found == seen_in(prompts[place].ids, prompts[place].pictures)


def seen_in(ids, pictures) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(ids.tolist()), tuple(one.sha256 for one in pictures)
