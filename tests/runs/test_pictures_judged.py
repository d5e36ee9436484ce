"""Stages reward and kto on pictures: loss and gradients of plain transformers in each family, exact resume, and what a
finished reward model is measured to be."""

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import surefoot
from helpers.prepared import prepared
from helpers.seeing import noise, seeing
from helpers.seen_by_transformers import QWEN, SEEING, Question, Seen, base_of, question
from helpers.tiers import representatives
from runs.test_pictures_run import config, opened, pairs, records, trained_and_resumed
from surefoot.data.batching.batch import Batch, example_digest, row_digests
from surefoot.data.batching.loader import Layout, all_example_batches, judged_batches, pair_batches
from surefoot.data.batching.subsets import longest_row, part_within
from surefoot.evaluate.reward import measure_reward
from surefoot.methods.losses.kto import Weights, kto_loss
from surefoot.methods.losses.logprobs import frozen, with_reference
from surefoot.methods.losses.reward import reward_objective
from surefoot.methods.open_reward import open_reward
from surefoot.methods.preference import step_kl
from surefoot.methods.requests import DataRequest
from surefoot.models.load import load_tokenizer
from surefoot.models.value_head import ScoredModel, ValueHead, value_width

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
SUMS = 1e-4  # of differences of log-probabilities, which sum to some hundred
BETA = 0.3
SIZES = {"grain": (56, 56), "sand": (56, 56), "snow": (84, 56), "moss": (64, 96)}
EACH = representatives(SEEING, "qwen2_5_vl")


def asked(folder: Path) -> list[tuple[Question, str, str]]:
    """Questions, one of them to two pictures of one size, with a better and a worse answer."""
    files = [noise(folder / f"{name}.png", size) for name, size in SIZES.items()]
    return [
        (question("colour?", files[2]), "blue", "red"),
        (question("which?", *files[:2]), "the first", "neither of them, and nothing else"),
        (question("and?", files[3]), "green", "blue or red"),
    ]


def prepare(folder: Path, base: Path, rows: list[dict], kind: str):
    (folder / f"{kind}.json").write_text(json.dumps(rows))
    tokenizer = load_tokenizer(base)
    return prepared(folder / f"{kind}.json", tokenizer, folder / "cache", kind=kind, max_length=4096).train


def turned(row: dict) -> dict:
    return row | {"images": row["images"][::-1]}


def without_pixels(rows: Batch) -> Batch:
    return replace(rows, pictures=None, seen=None)


def assert_gradients(model, theirs, relative: float = FP32_RELATIVE) -> None:
    """Of all that trains."""
    wanted = {key: one.grad for key, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in wanted.values())
    found = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    assert found
    for key, one in found.items():
        assert float((one - wanted[key]).abs().max()) <= relative * largest, key


@pytest.mark.parametrize("name", EACH)
def test_scores_loss_and_gradients_of_a_reward_model_are_transformers_own(tmp_path, name):
    base, ranked = base_of(name, tmp_path / "base", lively=name in QWEN), asked(tmp_path)
    rows = [one.record(chosen=better, rejected=worse) for one, better, worse in ranked]
    data = prepare(tmp_path, base, rows, "pairs")
    stop = int(data[0].ids[-1])
    backbone = opened(base)
    model = ScoredModel(backbone, ValueHead(value_width(backbone)))
    torch.manual_seed(0)
    torch.nn.init.normal_(model.v_head.summary.weight)
    theirs = Seen(name, base)
    head = model.v_head.summary.weight.detach().flatten()
    margins = [
        (theirs.last_hidden(one, better, stop) - theirs.last_hidden(one, worse, stop)) @ head
        for one, better, worse in ranked
    ]
    wanted = -F.logsigmoid(torch.stack(margins)).sum()
    wanted.backward()

    def loss(data, *, blind: bool = False) -> torch.Tensor:
        batches = pair_batches(data, range(len(ranked)), Layout(0))
        batches = [replace(one, rows=without_pixels(one.rows)) for one in batches] if blind else batches
        return torch.stack([reward_objective("last")(model, one).loss for one in batches]).sum()

    found = loss(data)
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=FP32_RELATIVE)
    assert_gradients(backbone, theirs.model)
    others = [row | {"images": [*row["images"][1:], rows[0]["images"][0]]} for row in rows]
    twins = [data, *(prepare(tmp_path, base, one, "pairs") for one in ([turned(row) for row in rows], others))]
    with torch.no_grad():  # twins: no pixels; two pictures of one row change places; each row has one of another row
        wrong = [loss(twin, blind=twin is data).item() for twin in twins[: None if name in QWEN else 1]]
    assert all(one != pytest.approx(wanted.item(), rel=10 * FP32_RELATIVE) for one in wrong)


@pytest.mark.parametrize("name", EACH)
def test_loss_kl_and_gradients_of_kto_are_transformers_own(tmp_path, name):
    base, ranked = base_of(name, tmp_path / "base", lively=name in QWEN), asked(tmp_path)
    said = [
        (one, better if good else worse, good) for good, (one, better, worse) in zip((1, 0, 1), ranked, strict=True)
    ]
    rows = [one.record(completion=words, label=bool(good)) for one, words, good in said]
    data = prepare(tmp_path, base, rows, "judged")
    stop = int(data[0].ids[-1])
    model = opened(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    reference, theirs, before = frozen(opened(base).eval()), Seen(name, base), Seen(name, base)
    theirs.model.load_state_dict(model.state_dict())

    def ratio(one: Question, words: str) -> torch.Tensor:
        with torch.no_grad():
            known = before.logprobs(one, words, stop).sum()
        return theirs.logprobs(one, words, stop).sum() - known

    with torch.no_grad():
        others = [ratio(one, said[(place + 1) % 3][1]) for place, (one, _, _) in enumerate(said)]
    kl = max(0.0, float(torch.stack(others).mean()))
    signs = [1 if good else -1 for _, _, good in said]
    losses = [torch.sigmoid(-sign * BETA * (ratio(*one[:2]) - kl)) for sign, one in zip(signs, said, strict=True)]
    wanted = torch.stack(losses).sum()
    wanted.backward()
    loaded = OneProcess(model)

    def measured(data, *, blind: bool = False) -> tuple[float, torch.Tensor]:
        batches = judged_batches(data, range(3), Layout(0), others=True)
        if blind:
            batches = [replace(one, others=one.others and without_pixels(one.others)) for one in batches]
            batches = [replace(one, rows=without_pixels(one.rows)) for one in batches]
        found = step_kl(loaded, reference, batches)  # pyright: ignore[reportArgumentType]
        objective = with_reference(kto_loss(Weights(BETA)), reference)
        return found, torch.stack([objective(model, replace(one, kl=found)).loss for one in batches]).sum()

    found, loss = measured(data)
    loss.backward()
    assert found == pytest.approx(kl, abs=SUMS)
    assert loss.item() == pytest.approx(wanted.item(), abs=SUMS)
    assert_gradients(model, theirs.model)
    twin = prepare(tmp_path, base, [turned(row) for row in rows], "judged")
    with torch.no_grad():  # twins: no pixels; two pictures of one row change places
        wrong = [measured(one, blind=one is data) for one in (data, twin)[: None if name in QWEN else 1]]
    for found, loss in wrong:
        assert loss.item() != pytest.approx(wanted.item(), abs=5 * SUMS)
        assert not kl or found != pytest.approx(kl, abs=5 * SUMS)


class OneProcess:
    """What `step_kl` reads of the models of a run in one process."""

    def __init__(self, model):
        self.model = model
        self.engine = type("Engine", (), {"device": torch.device("cpu"), "totals": staticmethod(list)})()
        self.settings = type("Settings", (), {"kernels": nullcontext, "forward": nullcontext})()


def judged(folder: Path) -> Path:
    records(folder)
    rows = [json.loads(line) for line in (folder / "d.jsonl").read_text().splitlines()]
    made = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1]["content"], "label": place % 2 == 0}
        for place, row in enumerate(rows)
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder / "d.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["reward", "kto"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, stage):
    seeing("qwen2_5_vl", tmp_path / "base")
    (pairs if stage == "reward" else judged)(tmp_path)
    trained_and_resumed(config(tmp_path, "whole", stage=stage, adapter={"kind": "lora", "rank": 2}), tmp_path)
    assert json.loads((tmp_path / "whole" / "data.json").read_text())["train"]["pictures"]["count"] == 3


@pytest.mark.parametrize("projector", representatives(["frozen", "trained"], "frozen"))
def test_a_finished_reward_model_scores_as_its_run_did(tmp_path, projector):
    """Also data that the command names, which it sees as large as the run did."""
    seeing("qwen2_5_vl", tmp_path / "base")
    pairs(tmp_path)
    raw = config(tmp_path, "run", stage="reward", adapter={"kind": "lora", "rank": 2}, duration="2 steps")
    raw |= {"vision": {"projector": projector}}
    raw["data"] |= {"eval": str(tmp_path / "d.jsonl"), "max_pixels": 56 * 56}
    surefoot.train(raw, stream=io.StringIO())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert plan["reward"]["shared_prompts"]["value"] is False
    evaluated = json.loads((tmp_path / "run" / "all_results.json").read_text())
    opened = open_reward(str(tmp_path / "run"))
    for request in (None, DataRequest(str(tmp_path / "d.jsonl"))):
        measured = measure_reward(opened, request)
        assert measured.report.loss == pytest.approx(evaluated["eval_loss"], rel=FP32_RELATIVE)
        assert measured.audit.pictures == 4


def of_two_pictures(folder: Path) -> list[dict]:
    """Pairs whose ids are the same."""
    files = [noise(folder / name, (56, 56)) for name in ("grain.png", "sand.png")]
    return [question("colour?", one).record(chosen="a", rejected="b") for one in files]


def test_an_answer_is_known_by_its_pictures_too(tmp_path):
    """What is stored about it (`alignment.reference: cached`) is that of its own pictures, whatever the batch."""
    base = base_of("qwen2_5_vl", tmp_path / "base", lively=True)
    data, reference = prepare(tmp_path, base, of_two_pictures(tmp_path), "pairs"), frozen(opened(base).eval())
    stored = {}
    for one in all_example_batches(data, Layout(0, most=1)):
        stored |= dict(zip(row_digests(one), reference(one).tolist(), strict=True))
    assert set(stored) == {example_digest(data[place]) for place in range(4)}
    (batch,) = pair_batches(data, range(2), Layout(0))
    found, wanted = [stored[one] for one in row_digests(batch.rows)], reference(batch.rows).tolist()
    assert found == pytest.approx(wanted, rel=FP32_RELATIVE)
    parts = [part_within(batch, 1), longest_row(batch.rows)]
    assert all(set(row_digests(one.rows)) < set(stored) for one in parts)
    # twin: ids do not tell them apart, and their log-probabilities differ
    assert torch.equal(batch.rows.input_ids[0], batch.rows.input_ids[1])
    assert wanted[0] != pytest.approx(wanted[1], rel=10 * FP32_RELATIVE)


@pytest.mark.slow
def test_a_stored_reference_is_that_of_the_pictures(tmp_path):
    base_of("qwen2_5_vl", tmp_path / "base", lively=True)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_two_pictures(tmp_path)))
    losses = []
    for reference in ("cached", "adapter-off"):
        raw = config(tmp_path, reference, stage="dpo", adapter={"kind": "lora", "rank": 2}, duration="3 steps")
        raw["alignment"] = {"reference": reference}
        raw["data"] |= {"eval": "none"}
        surefoot.train(raw, stream=io.StringIO())
        log = [json.loads(line) for line in (tmp_path / reference / "trainer_log.jsonl").read_text().splitlines()]
        losses.append([one["loss"] for one in log if one.get("loss") is not None])
    assert losses[0] == pytest.approx(losses[1], rel=FP32_RELATIVE)
