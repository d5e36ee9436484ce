"""Packed runs that learn from answers: the numbers of padded ones, whatever the reference and the split; resumed, the
same bytes. And what is evaluated, in a run and by command, comes out the same from packed rows."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import surefoot
from helpers.faults import gives
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.evaluate import loss as measured_rows
from surefoot.evaluate.loss import measure_loss
from surefoot.evaluate.reward import measure_reward
from surefoot.methods import reference
from surefoot.methods.open_model import open_for_use
from surefoot.methods.open_reward import open_reward
from surefoot.methods.requests import DataRequest
from surefoot.models import forward as documents
from surefoot.planning.plan import Choice
from surefoot.planning.precision import NARROW
from surefoot.runs import evaluating
from surefoot.runs.failures.replay import replay
from surefoot.system.errors import Diverged
from surefoot.training import loop as loop_module
from surefoot.training import step as step_module
from surefoot.training.failure import read_failure

STEPS, CUT = 3, 1
FP32 = 1e-4  # three steps of Adam on fp32 gradients whose sums were taken in another order
WORDS = ("sky", "heron", "trout", "answer")
WAYS = {
    "dpo": {"stage": "dpo"},
    "dpo, second model": {"stage": "dpo", "alignment": {"reference": "model", "loss": "ipo", "sft": 0.5}},
    "dpo, cached": {"stage": "dpo", "alignment": {"reference": "cached"}},
    "dpo, another": {"stage": "dpo", "alignment": {"reference": "BASE"}},
    "orpo, full": {"stage": "dpo", "alignment": {"loss": "orpo"}, "adapter": None},
    "kto": {"stage": "kto", "alignment": {"beta": 0.5}},
    "reward": {"stage": "reward"},
    "reward, divergence": {"stage": "reward", "reward": {"loss": "divergence"}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    pairs = [
        {
            "prompt": f"Say {WORDS[n % 4]} {n} times.",
            "chosen": " ".join([WORDS[n % 4]] * (1 + n % 5)),
            "rejected": " ".join(["question"] * (1 + n % 3)),
        }
        for n in range(14)
    ]
    judged = [
        {"prompt": one["prompt"], "completion": one["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
        for n, one in enumerate(pairs)
    ]
    asked = [{"instruction": one["prompt"], "input": "", "output": one["chosen"]} for one in pairs]
    for name, rows in (("pairs", pairs), ("judged", judged), ("asked", asked)):
        (folder / f"{name}.json").write_text(json.dumps(rows))
    tiny_llama(folder / "base", pad=True)
    return folder


@pytest.fixture
def train(world, tmp_path, monkeypatch):
    """Keys of the config by name. Returns the run folder."""
    monkeypatch.setattr(reference.process, "cache_folder", lambda: tmp_path / "cache")

    def run(name: str, *, packing="on", resume=False, **changes) -> Path:
        stage = changes.get("stage", "sft")
        file = {"kto": "judged", "sft": "asked"}.get(stage, "pairs")
        config = {
            "stage": stage,
            "model": str(world / "base"),
            "adapter": {"kind": "lora", "rank": 2},
            "data": {"train": str(world / f"{file}.json"), "eval": 4, "packing": packing},
            "batch": {"size": 6},
            "optim": {"lr": 1e-2},
            "precision": "fp32",
            "duration": f"{STEPS} steps",
            "eval_every": "1 step",
            "checkpoint": {"every": "1 step", "keep": STEPS},
            "output": str(tmp_path / name),
            **changes,
        }
        text = json.dumps({key: one for key, one in config.items() if one is not None}).replace(
            '"BASE"', json.dumps(str(world / "base"))
        )
        return surefoot.train(json.loads(text), resume=resume).folder

    return run


def log(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "kl", "reward_margin", "reward_accuracy", "eval_loss", "eval_reward_margin")
    return [{name: row[name] for name in names if name in row} for row in rows]


def same(one: Path, other: Path) -> bool:
    pairs = list(zip(log(one), log(other), strict=True))
    return all(first == pytest.approx(second, rel=FP32, abs=FP32) for first, second in pairs)


def planned(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text())["plan"]


@pytest.fixture
def layouts(monkeypatch):
    """Whether rows that the objective saw were packed, in training and in evaluation."""
    seen: set[tuple[str, bool]] = set()
    real = step_module.add_gradient

    def trained(engine, objective, batch, **named):
        seen.add(("trained", bool(batch.rows.documents)))
        return real(engine, objective, batch, **named)

    monkeypatch.setattr(step_module, "add_gradient", trained)
    whole = evaluating.evaluate_loss

    def evaluated(model, objective, batches, **named):
        def watched():
            for batch in batches:
                seen.add(("evaluated", bool(batch.rows.documents)))
                yield batch

        return whole(model, objective, watched(), **named)

    monkeypatch.setattr(evaluating, "evaluate_loss", evaluated)
    return seen


@pytest.mark.parametrize("way", representatives(WAYS, "dpo, cached", "kto"))
def test_a_packed_run_has_the_numbers_of_a_padded_one(train, layouts, way):
    packed = train("packed", **WAYS[way])
    assert layouts == {("trained", True), ("evaluated", True)}
    padded = train("padded", packing="off", **WAYS[way])
    assert same(packed, padded)
    assert (planned(packed)["kernels"]["documents"]["value"], len(log(packed))) == ("sdpa", len(log(padded)))


@pytest.mark.parametrize("stage", representatives(["dpo", "kto"], "kto"))
def test_the_split_changes_nothing(train, stage):
    whole = train("whole", stage=stage)
    split = train("split", stage=stage, batch={"size": 6, "micro": 2})
    assert same(whole, split)
    other = train("other", stage=stage, seed=9)
    assert not same(whole, other)  # twin


@pytest.mark.parametrize("stage", representatives(["kto", "reward"], "reward"))
def test_resumed_it_ends_with_the_same_bytes(train, stage):
    def ends(folder):
        return {file.name: file.read_bytes() for file in (folder / f"checkpoint-{STEPS}").glob("*.safetensors")}

    folder = train("run", stage=stage)
    uninterrupted = ends(folder)
    for step in range(CUT + 1, STEPS + 1):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for file in ("train_results.json", "all_results.json"):
        (folder / file).unlink(missing_ok=True)
    assert ends(train("run", stage=stage, resume=True)) == uninterrupted
    assert ends(train("padded", stage=stage, packing="off")) != uninterrupted  # twin: bytes tell rounding apart


@pytest.mark.parametrize("stage", representatives(["reward", "kto"]))
def test_a_wide_model_is_measured_and_its_pairs_are_counted(world, train, stage):
    """Narrow models are planned without a measurement, so that nothing of it would be seen to fail."""
    tiny_llama(world / "wide", hidden=NARROW, pad=True)
    run = train("wide", stage=stage, packing="auto", model=str(world / "wide"), precision=None, duration="1 step")
    plan = planned(run)
    assert {trial["form"] for trial in plan["measurements"]["documents"]} >= {"padded", "sdpa", "matmul"}
    assert plan["kernels"]["documents"]["source"] == "measured"
    assert re.search(r"\d%", plan["kernels"]["documents"]["reason"])  # the share of padding in padded rows
    assert plan["batch"]["tokens"] is not None


def test_rows_are_padded_where_a_model_loses_the_documents(train, monkeypatch):
    def lost(*_):
        raise documents._lost("not passed on to the attention layer")

    monkeypatch.setattr(
        "surefoot.planning.packing._unmeasured", lambda request, forms: Choice(forms[0], "for this test", "measured")
    )
    with monkeypatch.context() as broken:
        broken.setitem(documents.FORMS, "sdpa", lost)
        run = train("run", packing="auto", stage="kto")
    assert planned(run)["kernels"]["documents"]["value"] == "plain"
    assert log(run) == log(train("padded", packing="off", stage="kto"))


def test_what_a_run_evaluated_is_evaluated_again_by_command(world, train, monkeypatch):
    run = train("run", duration="1 step", kernels={"loss": "chunked"})
    seen = [row["eval_loss"] for row in log(run) if "eval_loss" in row]
    asked = DataRequest(str(world / "asked.json"), None, None, None)
    opened = open_for_use(str(run))
    told = []
    packed = measure_loss(opened, asked, on_progress=told.append)
    assert not documents.takes_documents(opened.model.get_base_model())
    monkeypatch.setattr(measured_rows, "_put_in", lambda *_: False)
    padded = measure_loss(open_for_use(str(run)), asked)
    assert seen
    kept = packed.audit.kept
    assert all(gives(told[0], value) for value in ("base", 0, kept))
    assert [one for one in told if gives(one, "adapter") and gives(one, 0) and gives(one, kept)]
    for side in ("base", "adapter"):
        one, two = packed.results[side], padded.results[side]
        assert (one.loss, one.perplexity) == pytest.approx((two.loss, two.perplexity), rel=FP32)
        assert (one.accuracy, one.weight) == (two.accuracy, two.weight)
    assert packed.results["base"].loss != pytest.approx(packed.results["adapter"].loss, rel=FP32)  # twin


def test_so_is_a_reward_model(world, train, monkeypatch):
    run = train("run", stage="reward", duration="1 step")
    asked = DataRequest(str(world / "pairs.json"), None, None, None)
    layouts = []
    real = measured_rows.whole_layout
    monkeypatch.setattr(measured_rows, "whole_layout", lambda *given: layouts.append(real(*given)) or layouts[-1])
    packed = measure_reward(open_reward(str(run)), asked)
    few = measure_reward(open_reward(str(run)), asked, pairs=3)
    monkeypatch.setattr(measured_rows, "_put_in", lambda *_: False)
    padded = measure_reward(open_reward(str(run)), asked)
    assert [layout.packed for layout in layouts] == [True, True, False]
    for one in (few, packed):
        assert one.report.metrics == pytest.approx(padded.report.metrics, rel=FP32, abs=FP32)
        assert (one.report.loss, one.report.weight) == pytest.approx((padded.report.loss, 14), rel=FP32)
        assert one.sums == [pytest.approx(row, rel=FP32, abs=FP32) for row in padded.sums]


@pytest.mark.parametrize("stage", representatives(["dpo", "kto", "reward"], "dpo"))
def test_a_packed_step_that_failed_is_replayed(train, tmp_path, monkeypatch, stage):
    real = loop_module.train_step

    def spoiled(engine, *arguments, **named):
        if named["step"] == 2:
            with torch.no_grad():
                next(one for name, one in engine.parameters.items() if "up_proj.lora_B" in name)[0, 0] = float("nan")
        return real(engine, *arguments, **named)

    with monkeypatch.context() as broken:
        broken.setattr(loop_module, "train_step", spoiled)
        with pytest.raises(Diverged):
            train("run", stage=stage, guard={"max_consecutive": 2}, kernels={"adapter": "plain"})
    kept = tmp_path / "run" / "failure-2"
    assert read_failure(kept).batches[0].rows.documents
    assert replay(kept).same_bits
    assert replay(kept, plain=True).same_place
    monkeypatch.setattr("surefoot.runs.failures.replay._load", lambda *arguments: None)
    assert not replay(kept).same_place  # twin: the weights are sound
