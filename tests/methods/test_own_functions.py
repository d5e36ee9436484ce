"""Functions that a config names: the run equals one whose caller passed them, and a resumed run knows them again."""

import json
import runpy
import shutil
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

import surefoot
from helpers.faults import prints_fault, raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.methods import own_functions
from surefoot.methods.own_functions import identity, own_function
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

def last(pairs):
    return -F.logsigmoid(pairs.better_score - pairs.worse_score)

def summed(pairs):
    return last(pairs).sum()

def lost(pairs):
    return pairs.constants

def mean(pairs, constants):
    return logistic(pairs, constants).mean()

number = 3
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return config_in(tmp_path)


def config_in(folder):
    """Paths are as in this folder, which gets what they name."""
    (folder / "train.json").write_text(json.dumps(ROWS))
    (folder / "own.py").write_text(OWN)
    return {
        "stage": "sft",
        "model": str(tiny_llama(folder / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": "train.json", "format": "custom", "eval": 2},
        "metrics": {"names": ["words"], "max_new_tokens": 4},
        "batch": {"size": 3},
        "duration": "2 steps",
        "output": "run",
    }


def own(name):
    """A function of OWN, as a caller from Python has it."""
    return runpy.run_path("own.py")[name]


NAMED = {"functions": {"loss": "own.py:doubled", "record": "own.py:sky", "metrics": ["own.py:words"]}}


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The folder of a finished run whose functions are named."""
    place = tmp_path_factory.mktemp("named")
    with chdir(place):
        surefoot.train(config_in(place) | NAMED)
    return place / "run"


def refused(config, code, where, **given):
    with raises_fault(code, where):
        surefoot.train(config, **given)


def line_of(text):
    return f"own.py:{[text in line for line in OWN.splitlines()].index(True) + 1}"


def resume_is_refused(longer):
    with raises_fault("SF-RESUME-CHANGED", Path("run/checkpoint-2")):
        surefoot.train(longer, resume=True)


def logged(run):
    """run: a finished one, or its folder."""
    folder = getattr(run, "folder", run)
    lines = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("loss", "eval_loss", "grad_norm", "eval_words") if key in row} for row in lines]


def weights(run):
    return (getattr(run, "folder", run) / "adapter_model.safetensors").read_bytes()


def test_a_named_function_does_what_a_passed_one_does(config, named):
    given = {"objective": own("doubled"), "metrics": {"words": own("words")}, "read_record": own("sky")}
    passed = surefoot.train(config | {"output": "passed"}, **given)
    assert (logged(named), weights(named)) == (logged(passed), weights(passed))
    assert any("eval_words" in row for row in logged(named))


def test_twin_without_the_named_loss_the_run_is_another(config, named):
    plain = surefoot.train(config | {"functions": NAMED["functions"] | {"loss": None}, "output": "plain"})
    assert logged(plain)[0]["loss"] == pytest.approx(logged(named)[0]["loss"] / 2, rel=1e-6)
    assert weights(plain) != weights(named)


def test_a_resumed_run_refuses_a_changed_loss_and_takes_a_moved_one(config, named, tmp_path):
    shutil.copytree(named, tmp_path / "run")
    (tmp_path / "own.py").rename(tmp_path / "moved.py")
    moved = {"functions": {key: str(value).replace("own.py", "moved.py") for key, value in NAMED["functions"].items()}}
    moved["functions"]["metrics"] = ["moved.py:words"]
    longer = config | {"duration": "3 steps"}
    (tmp_path / "moved.py").write_text(OWN.replace("2 * found.loss", "3 * found.loss"))
    resume_is_refused(longer | moved)
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
def test_what_is_not_there_is_one_fault_and_nothing_is_written(config, named, code, where):
    refused(config | {"functions": NAMED["functions"] | named}, code, where)
    assert not Path("run").exists()


def install(folder, points, *, name="own-losses", version="1.0", module="own_losses", code=OWN):
    """A package as a package manager leaves it in `folder`, which registers `points`."""
    facts = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{point} = {value}\n" for point, value in points.items()]
    (facts / "entry_points.txt").write_text("".join(["[surefoot.functions]\n", *lines]))
    (folder / f"{module}.py").write_text(code)


POINTS = {"twice": "own_losses:doubled", "tasks": "own_losses:sky", "words": "own_losses:words"}
REGISTERED = {
    "functions": {"loss": "entry_point:twice", "record": "entry_point:tasks", "metrics": ["entry_point:words"]}
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield tmp_path / "packages"
    sys.modules.pop("own_losses", None)


def test_what_a_package_registers_does_what_a_file_does(config, packages, named):
    install(packages, POINTS)
    registered = surefoot.train(config | REGISTERED)
    assert (logged(registered), weights(registered)) == (logged(named), weights(named))
    assert any("eval_words" in row for row in logged(registered))


def test_a_resumed_run_refuses_another_version_or_content_of_the_package(config, packages):
    install(packages, POINTS)
    surefoot.train(config | REGISTERED)
    longer = config | REGISTERED | {"duration": "3 steps"}
    for changed in ({"version": "1.1"}, {"code": f"{OWN}\n# changed\n"}):
        install(packages, POINTS, **changed)
        resume_is_refused(longer)
    install(packages, POINTS)
    assert surefoot.train(longer, resume=True).finished


@pytest.mark.parametrize(
    "points",
    [
        {"thrice": "own_losses:doubled"},
        {"twice": "own_losses"},
        {"twice": "own_losses:tripled"},
        {"twice": "own_losses:number"},
        {"twice": "own_missing:doubled"},
        {"twice": "entry_point:twice"},
    ],
    ids=["none", "half", "no-such-function", "no-function", "no-module", "itself"],
)
def test_what_is_not_whole_is_one_fault_and_nothing_is_written(config, packages, points):
    install(packages, points)
    named = {"functions": NAMED["functions"] | {"loss": "entry_point:twice"}}
    refused(config | named, "SF-OWN-FUNCTION", "functions.loss")
    assert not Path("run").exists()


def test_one_name_of_two_packages_is_refused(packages):
    install(packages, POINTS)
    assert own_function("entry_point:twice", "functions.loss").__name__ == "doubled"  # twin: of one package
    install(packages, POINTS, name="others", module="others")
    with raises_fault("SF-OWN-FUNCTION", "functions.loss"):
        own_function("entry_point:twice", "functions.loss")


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


@pytest.mark.parametrize(
    ("keys", "code", "where"),
    [
        ({"loss": "own.py:mean"}, "SF-OWN-FUNCTION", "alignment.loss"),
        ({"loss": "own.py:logistic_"}, "SF-OWN-FUNCTION", "alignment.loss"),
        ({"loss": "none.py:logistic"}, "SF-FILE-MISSING", "alignment.loss"),
        ({"loss": "logistic"}, "SF-CONFIG-VALUE", "alignment.loss"),
        ({"loss": "sigmoid", "reference": "none"}, "SF-CONFIG-CONFLICT", "alignment.reference"),
        ({"loss": "own.py:logistic", "reference": "none"}, "SF-OWN-FUNCTION", line_of("pairs.chosen_ratio")),
    ],
)
def test_what_is_no_loss_of_pairs_is_refused(pairs, keys, code, where):
    refused(pairs | {"alignment": keys}, code, where)


def reward_run(pairs, loss, output="run", **keys):
    return pairs | {"stage": "reward", "reward": {"loss": loss, **keys}, "output": output}


def test_a_loss_of_a_reward_model_of_one_s_own_is_the_built_in_one_of_the_same_formula(pairs):
    named = surefoot.train(reward_run(pairs, "own.py:last", "named", center=0.01))
    plain = surefoot.train(reward_run(pairs, "last", "plain", center=0.01))
    other = surefoot.train(reward_run(pairs, "divergence", "other", center=0.01))
    assert [row["loss"] for row in logged(named)[:2]] == pytest.approx([row["loss"] for row in logged(plain)[:2]])
    assert logged(named)[1]["loss"] != pytest.approx(logged(other)[1]["loss"])  # twin: another formula
    rows = [json.loads(line) for line in (named.folder / "trainer_log.jsonl").read_text().splitlines()]
    assert any("eval_reward_accuracy" in row for row in rows)


def test_evaluate_reward_measures_a_run_with_a_loss_of_one_s_own(pairs, tmp_path):
    """As its twin with the built-in loss of the same formula; the loss is one of the figures, so its file is needed."""
    for loss, output in (("own.py:last", "named"), ("last", "plain")):
        surefoot.train(reward_run(pairs, loss, output))
    found = []
    for output in ("named", "plain"):
        result = CliRunner().invoke(main, ["evaluate", "reward", output, "pairs.json", "--json"])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    named, plain = found
    assert named["data"]["pairs"] == plain["data"]["pairs"] > 0
    for figure in ("accuracy", "margin", "score_chosen", "score_rejected"):
        assert named[figure] == pytest.approx(plain[figure], abs=1e-6)
    assert named["loss"]["value"] == pytest.approx(plain["loss"]["value"], abs=1e-6)
    (tmp_path / "own.py").unlink()
    gone = CliRunner().invoke(main, ["evaluate", "reward", "named", "pairs.json"])
    assert (gone.exit_code, prints_fault(gone.stderr, "SF-FILE-MISSING", "reward.loss", "own.py")) == (2, True)


@pytest.mark.parametrize(
    ("keys", "code", "where"),
    [
        ({"loss": "own.py:summed"}, "SF-OWN-FUNCTION", "reward.loss"),
        ({"loss": "own.py:lost"}, "SF-OWN-FUNCTION", line_of("return pairs.constants")),
        ({"loss": "own.py:later"}, "SF-OWN-FUNCTION", "reward.loss"),
        ({"loss": "none.py:last"}, "SF-FILE-MISSING", "reward.loss"),
        ({"loss": "later"}, "SF-CONFIG-VALUE", "reward.loss"),
        (
            {"loss": "own.py:last", "num_padding_at_beginning": 1},
            "SF-CONFIG-CONFLICT",
            "reward.num_padding_at_beginning",
        ),
    ],
)
def test_what_is_no_loss_of_a_reward_model_is_refused(pairs, keys, code, where):
    refused(reward_run(pairs, **keys), code, where)


@pytest.mark.parametrize(
    "section",
    [
        {"stage": "dpo", "alignment": {"loss": "own.py:logistic"}},
        {"stage": "reward", "reward": {"loss": "own.py:last"}},
    ],
    ids=["pairs", "reward"],
)
def test_a_resumed_run_refuses_a_changed_loss_of_pairs(pairs, tmp_path, section):
    surefoot.train(pairs | section)
    longer = pairs | section | {"duration": "3 steps"}
    (tmp_path / "own.py").write_text(OWN.replace("-F.logsigmoid(", "-2 * F.logsigmoid("))
    resume_is_refused(longer)
    (tmp_path / "own.py").write_text(OWN)
    assert surefoot.train(longer, resume=True).finished


def test_two_losses_are_refused(config):
    refused(config | NAMED, "SF-CONFIG-CONFLICT", "functions.loss", objective=own("doubled"))


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
