"""Functions that a config names: the run equals one whose caller passed them, and a resumed run knows them again."""

import json
import sys

import pytest

import surefoot
from helpers.tiny_models import tiny_llama
from surefoot.methods import own_functions
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.own_functions import identity, own_function
from surefoot.system.errors import InputError, IntegrityError
from surefoot.system.locations import is_function

ROWS = [{"task": f"Say sky {n} times.", "words": ["sky"] * n} for n in range(1, 9)]
OWN = """
import surefoot
from surefoot.methods.losses.sft import sft_loss
from torch.nn import functional as F

def doubled(model, batch):
    found = sft_loss(model, batch)
    return surefoot.LossSum(2 * found.loss)

def sky(record):
    return [{"role": "user", "content": record["task"]}, {"role": "assistant", "content": " ".join(record["words"])}]

def words(answers):
    return sum(len(one.answer.split()) for one in answers) / len(answers)

def logistic(pairs, constants):
    return -F.logsigmoid(constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio))

def per_token(pairs, constants):
    return -F.logsigmoid(constants.beta * (pairs.chosen_mean - pairs.rejected_mean) - constants.margin)

def mean(pairs, constants):
    return logistic(pairs, constants).mean()

number = 3
"""


def doubled(model, batch):
    return surefoot.LossSum(2 * sft_loss(model, batch).loss)


def sky(record):
    return [{"role": "user", "content": record["task"]}, {"role": "assistant", "content": " ".join(record["words"])}]


def words(answers):
    return sum(len(one.answer.split()) for one in answers) / len(answers)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    (tmp_path / "own.py").write_text(OWN)
    return {
        "stage": "sft",
        "model": str(tiny_llama(tmp_path / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": "train.json", "format": "custom", "eval": 2},
        "metrics": {"names": ["words"], "max_new_tokens": 4},
        "batch": {"size": 3},
        "duration": "2 steps",
        "output": "run",
    }


NAMED = {"functions": {"loss": "own.py:doubled", "record": "own.py:sky", "metrics": ["own.py:words"]}}


def logged(result):
    lines = [json.loads(line) for line in (result.folder / "trainer_log.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("loss", "eval_loss", "grad_norm", "eval_words") if key in row} for row in lines]


def weights(result):
    return (result.folder / "adapter_model.safetensors").read_bytes()


def test_a_named_function_does_what_a_passed_one_does(config):
    named = surefoot.train(config | NAMED)
    passed = surefoot.train(config | {"output": "passed"}, objective=doubled, metrics={"words": words}, read_record=sky)
    assert (logged(named), weights(named)) == (logged(passed), weights(passed))
    assert any("eval_words" in row for row in logged(named))


def test_twin_without_the_named_loss_the_run_is_another(config):
    named = surefoot.train(config | NAMED)
    plain = surefoot.train(config | {"functions": NAMED["functions"] | {"loss": None}, "output": "plain"})
    assert logged(plain)[0]["loss"] == pytest.approx(logged(named)[0]["loss"] / 2, rel=1e-6)
    assert weights(plain) != weights(named)


def test_a_resumed_run_refuses_a_changed_loss_and_takes_a_moved_one(config, tmp_path):
    surefoot.train(config | NAMED)
    (tmp_path / "own.py").rename(tmp_path / "moved.py")
    moved = {"functions": {key: str(value).replace("own.py", "moved.py") for key, value in NAMED["functions"].items()}}
    moved["functions"]["metrics"] = ["moved.py:words"]
    longer = config | {"duration": "3 steps"}
    (tmp_path / "moved.py").write_text(OWN.replace("2 * found.loss", "3 * found.loss"))
    with pytest.raises(IntegrityError) as caught:
        surefoot.train(longer | moved, resume=True)
    assert [fault.code for fault in caught.value.faults] == ["SF-RESUME-CHANGED"]
    (tmp_path / "moved.py").write_text(OWN)
    assert surefoot.train(longer | moved, resume=True).finished


@pytest.mark.parametrize(
    ("named", "code", "where"),
    [
        ({"loss": "none.py:f"}, "SF-FILE-MISSING", "functions.loss"),
        ({"loss": "own.py:double"}, "SF-OWN-FUNCTION", "functions.loss"),
        ({"loss": "own.py:number"}, "SF-OWN-FUNCTION", "functions.loss"),
        ({"metrics": ["no_such_package.inner:f"]}, "SF-OWN-FUNCTION", "functions.metrics"),
        ({"loss": "doubled"}, "SF-OWN-FUNCTION", "functions.loss"),
    ],
)
def test_what_is_not_there_is_one_fault_and_nothing_is_written(config, tmp_path, named, code, where):
    with pytest.raises(InputError) as caught:
        surefoot.train(config | {"functions": NAMED["functions"] | named})
    assert [(fault.code, fault.where) for fault in caught.value.faults] == [(code, where)]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def pairs(config, tmp_path):
    rows = [{"prompt": f"Say sky {n} times.", "chosen": "sky " * n, "rejected": "trout"} for n in range(1, 9)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    changed = {"stage": "dpo", "data": {"train": "pairs.json", "eval": 2}, "metrics": {"names": []}}
    return config | changed


def with_loss(config, loss, output, **keys):
    return config | {"alignment": {"loss": loss, **keys}, "output": output}


@pytest.mark.parametrize(
    ("own", "built_in", "keys", "own_keys"),
    [
        ("own.py:logistic", "sigmoid", {"sft": 0.5}, {}),
        ("own.py:per_token", "simpo", {"margin": 0.2}, {"reference": "none"}),
    ],
)
def test_a_loss_of_pairs_of_one_s_own_is_the_built_in_one_of_the_same_formula(pairs, own, built_in, keys, own_keys):
    named = surefoot.train(with_loss(pairs, own, "named", **keys, **own_keys))
    plain = surefoot.train(with_loss(pairs, built_in, "plain", **keys))
    assert (logged(named), weights(named)) == (logged(plain), weights(plain))
    rewards = [
        [{key: value for key, value in json.loads(line).items() if "reward" in key or "logp" in key} for line in lines]
        for lines in ((one.folder / "trainer_log.jsonl").read_text().splitlines() for one in (named, plain))
    ]
    assert rewards[0] == rewards[1]
    assert any("reward_margin" in row for row in rewards[0])
    opened = json.loads((named.folder / "plan.json").read_text())["plan"]["reference"]["value"]
    assert opened == ("none" if own_keys else "adapter-off")


def test_twin_another_formula_is_another_run(pairs):
    named = surefoot.train(with_loss(pairs, "own.py:logistic", "named"))
    other = surefoot.train(with_loss(pairs, "hinge", "other"))
    assert weights(named) != weights(other)


def test_a_resumed_run_refuses_a_changed_loss_of_pairs(pairs, tmp_path):
    surefoot.train(with_loss(pairs, "own.py:logistic", "run"))
    (tmp_path / "own.py").write_text(OWN.replace("constants.beta *", "2 * constants.beta *"))
    longer = with_loss(pairs, "own.py:logistic", "run") | {"duration": "3 steps"}
    with pytest.raises(IntegrityError) as caught:
        surefoot.train(longer, resume=True)
    assert [fault.code for fault in caught.value.faults] == ["SF-RESUME-CHANGED"]
    (tmp_path / "own.py").write_text(OWN)
    assert surefoot.train(longer, resume=True).finished


@pytest.mark.parametrize(
    ("keys", "code", "where"),
    [
        ({"loss": "own.py:mean"}, "SF-OWN-FUNCTION", "alignment.loss"),
        ({"loss": "own.py:logistic_"}, "SF-OWN-FUNCTION", "alignment.loss"),
        ({"loss": "none.py:logistic"}, "SF-FILE-MISSING", "alignment.loss"),
        ({"loss": "logistic"}, "SF-CONFIG-VALUE", "alignment.loss"),
        ({"loss": "sigmoid", "reference": "none"}, "SF-CONFIG-CONFLICT", "alignment.reference"),
    ],
)
def test_what_is_no_loss_of_pairs_is_refused(pairs, keys, code, where):
    with pytest.raises(InputError) as caught:
        surefoot.train(pairs | {"alignment": keys})
    assert [(fault.code, fault.where) for fault in caught.value.faults] == [(code, where)]


def test_a_loss_that_says_none_and_asks_for_the_reference_is_told(pairs):
    with pytest.raises(InputError) as caught:
        surefoot.train(with_loss(pairs, "own.py:logistic", "run", reference="none"))
    assert [fault.code for fault in caught.value.faults] == ["SF-OWN-FUNCTION"]


def test_two_losses_are_refused(config):
    with pytest.raises(InputError) as caught:
        surefoot.train(config | NAMED, objective=doubled)
    assert [(fault.code, fault.where) for fault in caught.value.faults] == [("SF-CONFIG-CONFLICT", "functions.loss")]


def test_a_function_of_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "installed_losses.py").write_text("def f(a):\n    return a + 1\n")
    assert own_function("installed_losses:f", "functions.loss")(1) == 2
    before = identity("installed_losses:f")
    (tmp_path / "installed_losses.py").write_text("def f(a):\n    return a + 2\n")
    assert identity("installed_losses:f") != before
    del sys.modules["installed_losses"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a/b.py:f", True), ("pkg.mod:f", True), ("runs/reward", False), ("org/model", False), ("C:f", False),
     ("http://127.0.0.1:80/x.py:f", False), ("pkg.mod", False)],
)  # fmt: skip
def test_what_names_a_function(text, expected):
    assert is_function(text) is expected


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "loss.py"
    file.write_text("def f():\n    return 1\n")
    assert own_function(f"{file}:f", "functions.loss")() == 1
    file.write_text("def f():\n    return 2\n")
    assert own_function(f"{file}:f", "functions.loss")() == 2


def test_twin_a_cache_that_ignores_the_content_keeps_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(own_functions, "identity", lambda text: "same")
    file = tmp_path / "loss.py"
    for number in (1, 2):
        file.write_text(f"def f():\n    return {number}\n")
        assert own_function(f"{file}:f", "functions.loss")() == 1
