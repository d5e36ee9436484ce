"""Stages dpo and kto from data to run folder: where they start, what they compare with, how a step may be split."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import gives
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from helpers.zoo import ZOO
from surefoot.data.batching.batch import Example, collate
from surefoot.method_facts.losses import PAIR_LOSSES
from surefoot.methods import preference as preference_module
from surefoot.methods import reference
from surefoot.methods.losses.logprobs import answer_logprobs
from surefoot.methods.losses.preference import Constants, preference_loss
from surefoot.models.fast.chunked_head import loss_path
from surefoot.system.errors import InputError
from surefoot.training.objective import LossSum

FP32 = 1e-4  # two steps of Adam on fp32 gradients whose sums were taken in another order
KINDS = ("sky", "heron", "trout", "answer")


def pair(number: int) -> dict[str, str]:
    word = KINDS[number % len(KINDS)]
    better, worse = " ".join([word] * (1 + number % 5)), " ".join(["question"] * (1 + number % 3))
    return {"prompt": f"Say {word} {number} times.", "chosen": better, "rejected": worse}


def judged(number: int) -> dict[str, object]:
    one = pair(number)
    good = number % 3 != 0
    return {"prompt": one["prompt"], "completion": one["chosen" if good else "rejected"], "label": good}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    for name, make, count in (("pairs", pair, 14), ("judged", judged, 14)):
        (folder / f"{name}.json").write_text(json.dumps([make(number) for number in range(count)]))
    tiny_llama(folder / "base", pad=True)
    return folder


@pytest.fixture(scope="module")
def train(world):
    """Two steps; keys of the config by name. Returns the rows of the log and all_results.json, of an equal run before
    where there was one; fresh: not those."""
    known = {}

    def run(stage="dpo", *, adapter="lora", objective=None, fresh=False, **changes):
        key = json.dumps([stage, adapter, changes], sort_keys=True)
        if key in known and objective is None and not fresh:
            return known[key]
        config = {
            "stage": stage,
            "model": str(world / "base"),
            "data": {"train": str(world / f"{'pairs' if stage == 'dpo' else 'judged'}.json"), "eval": 4},
            "batch": {"size": 6},
            "optim": {"lr": 1e-2},
            "duration": "2 steps",
            "eval_every": "1 step",
            "output": str(world / f"run-{random.randrange(10**9)}"),
            **({"adapter": {"kind": adapter, "rank": 2}} if adapter else {}),
            **changes,
        }
        result = surefoot.train(config, objective=objective)
        rows = [json.loads(line) for line in (result.folder / "trainer_log.jsonl").read_text().splitlines()]
        if objective is None and not fresh:
            known[key] = rows, result
        return rows, result

    return run


def steps(rows, *names):
    return np.array([[row[name] for name in names] for row in rows if "loss" in row])


LOGGED = ("loss", "grad_norm", "reward_margin")


ADAPTERS = pytest.mark.parametrize("adapter", representatives(["lora", None], "lora"))


@ADAPTERS
def test_a_run_starts_at_ln_2_without_a_margin(train, adapter):
    rows, result = train(adapter=adapter, eval_at_start=True)
    begun, first = (next(row for row in rows if key in row) for key in ("eval_loss", "loss"))
    for row, prefix in ((begun, "eval_"), (first, "")):
        assert row[f"{prefix}loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert row[f"{prefix}reward_margin"] == pytest.approx(0, abs=1e-5)
    assert "eval_perplexity" not in begun
    assert (begun["eval_pairs"], first["pairs"]) == (4, 6)
    assert result.results["eval_reward_margin"] > 0
    assert not {"perplexity", "eval_tokens", "train_supervised_tokens"} & result.results.keys()


def test_twin_another_reference_is_not_where_the_policy_starts(train, world):
    tiny_llama(world / "other", pad=True, seed=9)
    rows, _ = train(alignment={"reference": str(world / "other")})
    assert steps(rows, "loss")[0, 0] != pytest.approx(math.log(2), rel=1e-4)


def _no_reference(*_):
    raise AssertionError("a reference was opened")


WITHOUT = [name for name, facts in PAIR_LOSSES.items() if not facts.reference]


@pytest.mark.parametrize("loss", representatives(WITHOUT, "cpo"))
def test_a_loss_without_a_reference_opens_none(train, monkeypatch, loss):
    """It once did: exit 0, and rewards and margins of 0 against a reference that the policy equals."""
    for name in ("adapter_off", "frozen", "cached_reference", "open_for_use"):
        monkeypatch.setattr(reference, name, _no_reference)
    rows, result = train(alignment={"loss": loss}, fresh=True)
    assert json.loads((result.folder / "plan.json").read_text())["plan"]["reference"]["value"] == "none"
    assert all(abs(margin) > 1e-4 for margin in steps(rows, "reward_margin")[:, 0])
    if loss == "cpo":
        found = steps(rows, "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
        assert found[:, :2] == pytest.approx(0.1 * found[:, 2:], rel=1e-5)
    with pytest.raises(AssertionError, match="was opened"):  # twin: one that has a reference
        train(alignment={"loss": "sigmoid"}, fresh=True)


ADDED = """
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "surefoot"]:  # of a process that was forked
    del sys.modules[name]
from surefoot.method_facts import losses

losses.PAIR_LOSSES = {**losses.PAIR_LOSSES, "added": losses.LossFacts(reference=False, keys=("label_smoothing",))}
if sys.argv[2] == "whole":  # a row of formulas as well, which `joined` would find in the table
    whole = losses.joined

    def joined(facts, functions, tables):
        if facts is not losses.PAIR_LOSSES:
            return whole(facts, functions, tables)
        from surefoot.methods.losses.preference import PairLoss, _cpo, _summed

        return whole(facts, {**functions, "added": PairLoss(_cpo, _summed)}, tables)

    losses.joined = joined
import surefoot

result = surefoot.train(json.loads(sys.argv[1]))
print(json.dumps([json.loads(line) for line in (result.folder / "trainer_log.jsonl").read_text().splitlines()]))
"""


@pytest.mark.parametrize("parts", representatives(["whole", "half"], "whole"))
def test_a_loss_is_added_by_its_rows_alone(world, tmp_path, any_python, parts):
    """Its facts and its formulas, no other place: schema, plan, reference and log follow."""
    config = {
        "stage": "dpo",
        "model": str(world / "base"),
        "data": {"train": str(world / "pairs.json")},
        "adapter": {"kind": "lora", "rank": 2},
        "alignment": {"loss": "added"},
        "batch": {"size": 6},
        "duration": "2 steps",
        "output": str(tmp_path / "added"),
    }
    found = subprocess.run([any_python, "-c", ADDED, json.dumps(config), parts], capture_output=True, text=True)
    if parts == "half":  # twin: facts without formulas
        assert found.returncode != 0
        assert "added" in found.stderr.splitlines()[-1]
        assert not (tmp_path / "added").exists()
        return
    assert found.returncode == 0, found.stderr
    rows = [row for row in json.loads(found.stdout.splitlines()[-1]) if "loss" in row]
    plan = json.loads((tmp_path / "added" / "plan.json").read_text())["plan"]
    assert (len(rows), plan["reference"]["value"]) == (2, "none")
    for row in rows:
        assert row["reward_chosen"] == pytest.approx(0.1 * row["logp_chosen"], rel=1e-5)
        assert abs(row["reward_margin"]) > 1e-4


@ADAPTERS
def test_every_kind_of_reference_gives_the_same_run(train, world, adapter):
    kinds = ["model", "cached", str(world / "base"), *(["adapter-off"] if adapter else [])]
    found = {kind: steps(train(adapter=adapter, alignment={"reference": kind})[0], *LOGGED) for kind in kinds}
    for kind in kinds[1:]:
        assert np.allclose(found[kind], found["model"], rtol=FP32, atol=1e-5), kind


@torch.no_grad()
def test_a_model_that_caps_its_logits_has_the_policys_bits_as_a_reference(tmp_path):
    """Its own forward caps them in bf16, the chunked head in fp32: it has to take the policy's way."""
    model = AutoModelForCausalLM.from_pretrained(ZOO["gemma2"](tmp_path / "gemma2"))
    model.lm_head.weight.data *= 30
    rows = collate([Example(np.arange(4, 20 + n), np.arange(16 + n) >= 8, n) for n in range(2)], 0)

    def sums(form):
        plan: Any = SimpleNamespace(kernels=SimpleNamespace(loss=SimpleNamespace(value=form)))
        frozen = reference._frozen_model(copy.deepcopy(model), plan)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return reference.frozen(frozen)(rows)

    plain, chunked = sums("plain"), sums("chunked")
    policy = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(answer_logprobs(policy, rows).sums, plain)
        loss_path(256).install(policy)
        assert torch.equal(answer_logprobs(policy, rows).sums, chunked)
    assert not torch.equal(plain, chunked)  # twin


SPLIT = {
    "ipo": ("dpo", {"loss": "ipo", "sft": 0.5}),
    "orpo": ("dpo", {"loss": "orpo"}),
    "kto": ("kto", {"bad": 0.5}),
}


@pytest.mark.parametrize("case", representatives(SPLIT, "ipo"))
def test_the_split_into_micro_batches_changes_nothing(train, case):
    """Of KTO with larger steps: the twin below."""
    stage, alignment = SPLIT[case]
    whole, split = (train(stage, alignment=alignment, batch={"size": 6, "micro": micro})[0] for micro in (6, 2))
    assert np.allclose(steps(split, "loss", "grad_norm"), steps(whole, "loss", "grad_norm"), rtol=FP32)
    evaluations = [[row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (whole, split)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=FP32)


def test_twin_a_kl_for_each_micro_batch_depends_on_the_split(train, monkeypatch):
    kto = {"alignment": {"beta": 1.0}, "optim": {"lr": 5e-2}, "duration": "3 steps"}
    whole = steps(train("kto", batch={"size": 6, "micro": 6}, **kto)[0], "loss", "kl")
    same = steps(train("kto", batch={"size": 6, "micro": 2}, **kto)[0], "loss", "kl")
    assert np.allclose(same, whole, rtol=FP32, atol=FP32)
    assert whole[-1, 1] > 0  # there is something to get wrong
    together = preference_module.step_kl

    def apart(loaded, reference, batches):
        return max(together(loaded, reference, [batch]) for batch in batches)

    monkeypatch.setattr(preference_module, "step_kl", apart)
    wrong = steps(train("kto", batch={"size": 6, "micro": 2}, fresh=True, **kto)[0], "loss", "kl")
    assert not np.allclose(wrong, whole, rtol=FP32, atol=FP32)


@ADAPTERS
def test_kto_tells_good_from_bad(train, adapter):
    rows, result = train("kto", adapter=adapter, eval_at_start=True, duration="8 steps")
    begun = next(row for row in rows if "eval_loss" in row)
    assert begun["eval_loss"] == pytest.approx(0.5, rel=1e-5)
    assert begun["eval_answers"] == 4
    assert {"reward_good", "reward_bad", "logp_good", "logp_bad", "kl"} <= {key for row in rows for key in row}
    assert result.results["eval_loss"] < 0.5


def test_the_best_checkpoint_by_a_metric_of_the_stage(train):
    _, result = train(checkpoint={"best": "reward_accuracy"})
    found = re.findall(r"\b(\d+) evaluation (\w+)", (result.folder / "run.log").read_text())
    assert ("4", "pairs") in found
    assert "8" not in dict(found)  # twin: each pair is two examples
    assert result.results["eval_reward_accuracy"] >= 0.5
    with pytest.raises(InputError) as caught:
        train("sft", checkpoint={"best": "reward_margin"})
    assert caught.value.faults[0].where == "checkpoint.best"


def test_a_margin_needs_both_kinds_of_answers(train, world):
    (world / "good.json").write_text(json.dumps([judged(number) for number in (1, 2, 4, 5)]))
    data = {"train": str(world / "judged.json"), "eval": str(world / "good.json")}
    with pytest.raises(InputError) as caught:
        train("kto", data=data, checkpoint={"best": "reward_margin"})
    assert caught.value.faults[0].where == "checkpoint.best"
    rows, _ = train("kto", data=data)
    assert not any("eval_reward_margin" in row for row in rows)


def test_an_objective_of_the_callers_own_gets_the_reference(train):
    usual = preference_loss("sigmoid", Constants(0.1))

    def doubled(model, batch):
        assert batch.reference is not None
        return LossSum(2 * usual(model, batch).loss)

    rows, _ = train(objective=doubled)
    assert rows[0]["loss"] == pytest.approx(2 * math.log(2), rel=1e-6)


def test_another_tokenizer_is_refused(train, world):
    other = tiny_llama(world / "other-tokenizer", pad=False)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        train(alignment={"reference": str(other)})
    assert (caught.value.faults[0].code, caught.value.faults[0].where) == ("SF-TOKENIZER", "alignment.reference")


def test_the_plan_counts_a_second_model(train):
    plans = {}
    for kind in ("model", "adapter-off", "cached"):
        _, result = train(alignment={"reference": kind})
        plans[kind] = json.loads((result.folder / "plan.json").read_text())["plan"]
    beside = {kind: plan["memory"]["beside"] for kind, plan in plans.items()}
    assert beside == {"model": 4 * plans["model"]["parameters"], "adapter-off": 0, "cached": 0}
    assert "second copy" in plans["model"]["reference"]["reason"]


CACHED = {"alignment": {"reference": "cached"}, "fresh": True, "eval_every": None}


@pytest.fixture(scope="module")
def filled(train, tmp_path_factory):
    """A cache folder, and the rows and result of the run that filled it."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.process, "cache_folder", lambda: folder)
        return folder, *train(**CACHED)


@pytest.fixture
def cache(filled, monkeypatch, tmp_path):
    """A copy of it, for the runs of one test."""
    shutil.copytree(filled[0], tmp_path / "cache")
    monkeypatch.setattr(reference.process, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "reference"


@pytest.fixture
def computed(monkeypatch):
    """How many log-probabilities were computed, for each run that computed any."""
    counts, compute = [], reference._computed

    def counting(*given):
        found = compute(*given)
        counts.append(len(found))
        return found

    monkeypatch.setattr(reference, "_computed", counting)
    return counts


def test_cached_numbers_are_found_again_and_checked(train, filled, cache, computed):
    _, first, _ = filled
    second, _ = train(**CACHED)
    assert computed == []
    assert (steps(first, *LOGGED) == steps(second, *LOGGED)).all()
    (folder,) = cache.iterdir()
    known = reference._read(folder)
    assert known is not None
    assert len(known) == 28
    reference._write(folder, {key: value - 1 for key, value in known.items()})  # intact, and not what it should be
    third, _ = train(**CACHED)
    assert computed == [28]
    assert (steps(first, *LOGGED) == steps(third, *LOGGED)).all()


def test_twin_numbers_that_nobody_checks_are_believed(train, filled, cache, monkeypatch):
    (folder,) = cache.iterdir()
    known = reference._read(folder)
    assert known is not None
    draw = random.Random(1)
    reference._write(folder, {key: value + draw.uniform(-5, 5) for key, value in known.items()})
    monkeypatch.setattr(reference, "_checked", lambda known, *rest: known)
    second, _ = train(**CACHED)
    assert not np.allclose(steps(filled[1], *LOGGED), steps(second, *LOGGED))


def test_a_damaged_cache_is_made_again(train, cache, computed):
    (folder,) = cache.iterdir()
    values = folder / "values.npy"
    content = bytearray(values.read_bytes())
    content[-1] ^= 1
    values.write_bytes(content)
    assert reference._read(folder) is None
    train(**CACHED)
    assert computed == [28]


def test_a_blank_batch_has_a_reference_and_an_unknown_answer_has_none():
    """A rank without a batch of its own computes a blank one, whose rows are in no cache at their full width."""
    rows = collate([Example(np.array([5, 6, 7]), np.array([False, False, True]), number) for number in (0, 1)], 0)
    assert reference._look_up({}, rows.blank()).tolist() == [0.0, 0.0]
    with pytest.raises(KeyError):
        reference._look_up({}, rows)


def test_a_cache_counts_only_where_every_rank_has_it():
    known = {b"answer": 1.0}
    for elsewhere, kept in ((0.0, True), (1.0, False)):  # ranks that have none
        engine = SimpleNamespace(totals=lambda values, more=elsewhere: [value + more for value in values])
        assert (reference._agreed(known, engine) is not None) == kept  # pyright: ignore[reportArgumentType]
        assert reference._agreed(None, engine) is None  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_is_refused_before_anything_runs(train):
    for stage, changes, key in (
        ("dpo", {"alignment": {"reference": "adapter-off"}, "adapter": None}, "alignment.reference"),
        ("dpo", {"alignment": {"loss": "orpo", "reference": "model"}}, "alignment.reference"),
        ("kto", {"alignment": {"reference": "cached"}}, "alignment.reference"),
        ("kto", {"batch": {"size": 1}}, "batch.size"),
    ):
        with pytest.raises(InputError) as caught:
            train(stage, **changes)
        assert caught.value.faults[0].where == key


@pytest.mark.parametrize(("size", "alone"), [(5, False), (3, True)])
def test_an_example_alone_in_its_step_is_not_compared_with_its_own_answer(train, size, alone):
    kto = {"alignment": {"beta": 1.0}, "optim": {"lr": 5e-2}, "duration": "1 epoch"}
    rows, result = train("kto", batch={"size": size}, **kto)  # 10 examples
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert any(one["kind"] == "caution" and gives(one["text"], "KL") for one in events) == alone
    found = [row["kl"] for row in rows if "loss" in row]
    assert any(found)
    assert found[-1] == 0.0 or not alone
