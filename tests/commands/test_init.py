"""`surefoot init` writes a config that plans at once, with what its stage is asked for explained and the rest named."""

import gzip
import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from helpers.faults import lines_giving
from helpers.tiny_models import tiny_llama
from surefoot.commands import init as stage
from surefoot.commands.init import starting_config
from surefoot.commands.main import main
from surefoot.config.keys import all_keys
from surefoot.config.load import load_config
from surefoot.config.method_contradictions import unread_keys
from surefoot.config.yaml_reader import parse_yaml
from surefoot.method_facts.methods import METHODS
from surefoot.runs.make_plan import make_plan

RATES = {name: method.first_rate for name, method in METHODS.items()}

ALPACA = {"instruction": "Name a bird.", "input": "", "output": "Heron"}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
FILES: dict[str, tuple[str, str]] = {  # name -> content, the layout that is recognized
    "alpaca.json": (json.dumps([ALPACA] * 250), "250 records, alpaca"),
    "few.jsonl": (json.dumps(ALPACA), "1 records, alpaca"),
    "chat.jsonl": (json.dumps(MESSAGES), "1 records, messages"),
    "old.jsonl": (json.dumps(SHAREGPT), "1 records, sharegpt"),
    "table.csv": ("instruction,output\nName a bird.,Heron\n", "1 records, alpaca"),
    "texts.jsonl": (json.dumps({"text": "The heron waits."}), "1 records, text"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "base").symlink_to(base)
    for name, (content, _) in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_can_be_planned(folder: Path, name: str) -> None:
    result = call("init", "base", name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "surefoot plan run.yaml" in result.stdout
    assert FILES[name][1] in " ".join((folder / "run.yaml").read_text().replace("#", "").split())
    assert call("plan", "run.yaml").exit_code == 0
    config = load_config("run.yaml").config
    assert config.output == f"runs/base-{name.split('.')[0]}"
    assert config.data.eval == (stage.HELD_OUT if name == "alpaca.json" else "none")


def test_packed_data(folder: Path) -> None:
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(json.dumps(ALPACA).encode()))
    assert call("init", "base", "packed.jsonl.gz").exit_code == 0


GIVEN = {"model": "m", "data.train": "d.json", "output": "o", "optim.lr": 1e-4}


def check_every_key_that_is_read(stage_name: str) -> None:
    """Each is written, or named among the others; what the stage does not read is nowhere."""
    text = starting_config({"stage": stage_name, **GIVEN}, {}, "s")
    written, others = text.split("# --- Everything else, at its default ---")
    named = {name.rstrip(".") for name in re.findall(r"[\w.]+", others)}
    unread = unread_keys(stage_name)
    for key in all_keys().values():
        if key.group.count(".") or key.group.startswith("data.") or key.group == "model":
            continue
        under = f"(?ms)^(# )?{key.group}:$.*?^[# ]+" if key.group else "(?m)^(# )?"
        there = key.path in named or key.group in named or re.search(rf"{under}{key.name}:", written) is not None
        assert there == (key.path not in unread and key.group not in unread), key.path


@pytest.mark.parametrize("name", RATES)
def test_every_key_that_the_stage_reads_is_written_or_named(name: str) -> None:
    check_every_key_that_is_read(name)
    assert len(starting_config({"stage": name, **GIVEN}, {}, "s").splitlines()) < 130


def test_twin_without_a_key_of_the_stage_it_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_rest", lambda section, unread: [])
    with pytest.raises(AssertionError, match=r"format|dropout"):
        check_every_key_that_is_read("sft")


def test_defaults_stand_in_comments(folder: Path) -> None:
    call("init", "base", "alpaca.json")
    text = (folder / "run.yaml").read_text()
    assert "# duration: 3 epochs\n" in text
    assert "#   rank: 16 " in text
    assert "PAD " in text.split("\nmodel: base")[0]


@pytest.mark.parametrize(
    ("count", "evaluated", "saved", "steps"),
    [(12, "200 steps", "1 epoch", 1), (250, "1 epoch", "1 epoch", 15), (3400, "200 steps", "200 steps", 202)],
)
def test_a_short_epoch_is_evaluated_and_saved_whole(
    folder: Path, count: int, evaluated: str, saved: str, steps: int
) -> None:
    """Without evaluation data the first says nothing."""
    (folder / "own.json").write_text(json.dumps([ALPACA] * count))
    assert call("init", "base", "own.json").exit_code == 0
    config = load_config("run.yaml").config
    assert (str(config.eval_every), str(config.checkpoint.every)) == (evaluated, saved)
    said = lines_giving((folder / "run.yaml").read_text(), "epoch", steps)
    assert bool(said) == (saved == "1 epoch")
    plan = json.loads(call("plan", "run.yaml", "--json").stdout)
    assert -(-(count - round(0.05 * count if count >= 200 else 0)) // plan["batch"]["size"]["value"]) == steps


def test_twin_at_the_defaults_a_small_run_would_end_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_rhythm", lambda config, records: {})
    with pytest.raises(AssertionError, match="200 steps"):
        test_a_short_epoch_is_evaluated_and_saved_whole(folder, 250, "1 epoch", "1 epoch", 15)


PAIR = {"prompt": "Name a bird.", "chosen": "Heron", "rejected": "Stone"}
JUDGED = {"prompt": "Name a bird.", "completion": "Stone", "label": False}
TEXT = {"text": "The heron waits."}


@pytest.mark.parametrize(
    ("record", "asked", "taken"),
    [
        (PAIR, None, "dpo"),
        (PAIR, "reward", "reward"),
        (JUDGED, None, "kto"),
        (TEXT, None, "sft"),
        (TEXT, "pretrain", "pretrain"),
        (ALPACA | {"label": "bird"}, None, "sft"),
    ],
)
def test_the_stage_follows_from_the_data_unless_one_is_asked_for(
    folder: Path, record: dict[str, Any], asked: str | None, taken: str
) -> None:
    (folder / "own.json").write_text(json.dumps([record] * 2))
    assert call("init", "base", "own.json", *(["--stage", asked] if asked else [])).exit_code == 0
    assert load_config("run.yaml").config.stage == taken
    assert call("plan", "run.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (["grpo"], None),  # the records have an answer to compare with
        (["ppo", "ppo.reward=own.py:score"], None),
        (["distill", "distill.teacher=base"], None),
        (["ppo"], "ppo.reward"),
        (["distill"], "distill.teacher"),
    ],
)
def test_a_stage_with_a_source_of_scores_or_a_teacher_can_be_planned(
    folder: Path, asked: list[str], refused: str | None
) -> None:
    (folder / "own.json").write_text(json.dumps([{"prompt": "2 + 2?", "answer": "4", **ALPACA}] * 2))
    (folder / "own.py").write_text("def score(prompts, responses):\n    return [0.0 for _ in responses]\n")
    result = call("init", "base", "own.json", "--stage", *asked)
    assert result.exit_code == (2 if refused else 0), result.output
    if refused:
        assert lines_giving(result.stderr, refused, f"{refused}=…")
        assert not (folder / "run.yaml").exists()
        return
    config = load_config("run.yaml").config
    assert config.stage == asked[0]
    assert [term.name for term in config.grpo.rewards] == (["numeric"] if asked == ["grpo"] else [])
    assert call("plan", "run.yaml").exit_code == 0


def test_without_an_answer_to_compare_with_rewards_have_to_be_named(folder: Path) -> None:
    result = call("init", "base", "alpaca.json", "--stage", "grpo")
    assert (result.exit_code, bool(lines_giving(result.stderr, "grpo.rewards", "SF-REWARD"))) == (2, True)
    rewards = "grpo.rewards=[{name: exact, field: output}]"
    assert call("init", "base", "alpaca.json", "--stage", "grpo", rewards).exit_code == 0
    assert load_config("run.yaml").config.grpo.rewards[0].field == "output"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["adapter.rank=64"], {"kind": "lora", "rank": 64, "alpha": 128}),
        (["adapter={kind: dora, rank: 4}"], {"kind": "dora", "rank": 4, "alpha": 8}),
        (["adapter.rank=64", "adapter.alpha=16"], {"kind": "lora", "rank": 64, "alpha": 16}),  # twin: a user's own
        (["adapter=null"], None),
    ],
)
def test_alpha_follows_the_rank(folder: Path, given: list[str], expected: dict[str, Any] | None) -> None:
    assert call("init", "base", "alpaca.json", *given).exit_code == 0
    written = parse_yaml((folder / "run.yaml").read_text(), "run.yaml")[0].data
    assert written.get("adapter") == expected


def test_given_keys_stand_in_the_config_and_are_not_named_as_defaults(folder: Path) -> None:
    more = ["log_every=3", "optim.betas=[0.9, 0.95]", "data.eval=8", "samples.count=2", "model.dropout=0.1"]
    assert call("init", "base", "alpaca.json", *more).exit_code == 0
    config = load_config("run.yaml").config
    assert (config.log_every, config.optim.betas, config.data.eval, config.samples.count) == (3, (0.9, 0.95), 8, 2)
    assert (config.model.path, config.model.dropout) == ("base", 0.1)
    others = (folder / "run.yaml").read_text().split("# --- Everything else, at its default ---")[1]
    assert not {"log_every", "optim.betas", "samples"} & {*re.findall(r"[\w.]+", others)}
    (folder / "run.yaml").unlink()
    assert call("init", "base", "alpaca.json", "optim.lrr=1").exit_code == 2
    assert not (folder / "run.yaml").exists()


def test_a_stage_that_cannot_learn_from_the_data_is_refused(folder: Path) -> None:
    (folder / "own.json").write_text(json.dumps([PAIR] * 2))
    for asked in ("sft", "kto"):
        result = call("init", "base", "own.json", "--stage", asked)
        assert (result.exit_code, "SF-DATA-FORMAT" in result.stderr) == (2, True)
        assert not (folder / "run.yaml").exists()


def test_rates_are_those_of_the_recipes() -> None:
    folder = Path(__file__).parents[2] / "recipes"
    for name, rate in RATES.items():
        rates = [
            parse_yaml(path.read_text(), path.name)[0].data["optim"]["lr"] for path in folder.glob(f"{name}-*lora.yaml")
        ]
        assert rate in rates, name


def test_the_editor_is_pointed_at_a_schema_that_is_there(folder: Path) -> None:
    call("init", "base", "alpaca.json", "--out", "configs/first.yaml")
    text = (folder / "configs" / "first.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=surefoot.schema.json\n")
    schema = json.loads((folder / "configs" / "surefoot.schema.json").read_text())
    assert jsonschema.Draft202012Validator(schema).is_valid(parse_yaml(text, "first.yaml")[0].data)


def test_nothing_is_overwritten(folder: Path) -> None:
    assert call("init", "base", "alpaca.json").exit_code == 0
    before = (folder / "run.yaml").read_text()
    result = call("init", "base", "few.jsonl")
    assert (result.exit_code, result.stderr.rpartition(" ")[2]) == (2, "[SF-USE-OUTPUT]\n")
    assert (folder / "run.yaml").read_text() == before
    assert call("init", "base", "few.jsonl", "--out", "second.yaml").exit_code == 0, "the schema is ours"
    (folder / "surefoot.schema.json").write_text("{}")
    assert call("init", "base", "few.jsonl", "--out", "third.yaml").exit_code == 2, "this one is not"
    assert not (folder / "third.yaml").exists()


@pytest.mark.parametrize(
    ("model", "data", "place", "code"),
    [
        ("bsae", "few.jsonl", "model.path: ", "SF-FILE-MISSING"),
        ("base", "fwe.jsonl", "data.train.path: ", "SF-FILE-MISSING"),
        ("base", "base/config.json", "base/config.json:1:1: ", "SF-DATA-ROW"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(folder: Path, model: str, data: str, place: str, code: str) -> None:
    result = call("init", model, data)
    assert result.exit_code == 2
    first = result.stderr.splitlines()[0]
    assert (place in first, first.rpartition(" ")[2]) == (True, f"[{code}]")
    assert not (folder / "run.yaml").exists()
    assert not (folder / "surefoot.schema.json").exists()


def proposal(monkeypatch: pytest.MonkeyPatch, parameters: int, memory: int) -> dict[str, Any]:
    """The config for a model of that size on a machine with so many bytes."""

    def plan(config: Any, **options: Any) -> Any:
        made = make_plan(config, **options)
        needed = 16 * parameters if config.adapter is None else 2 * parameters
        planned = replace(made.memory, available=memory, weights=needed)
        return replace(made, parameters=parameters, memory=planned)

    monkeypatch.setattr("surefoot.runs.make_plan.make_plan", plan)
    text = stage.propose("base", "alpaca.json", schema="x")
    return parse_yaml(text, "run.yaml")[0].data


@pytest.mark.parametrize(
    ("parameters", "memory", "adapter"),
    [(10**8, 2**36, None), (10**8, 2**30, "lora"), (10**10, 2**40, "lora")],
)
def test_small_models_that_fit_are_trained_in_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: int, memory: int, adapter: str | None
) -> None:
    data = proposal(monkeypatch, parameters, memory)
    assert data.get("adapter", {}).get("kind") == adapter
    assert data["optim"]["lr"] == (2e-5 if adapter is None else 2e-4)


def test_twin_without_quotes_a_name_that_looks_like_a_number_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"stage": "sft", "model": "1e4", "data.train": "no # comment", "output": "x: y"}
    data = parse_yaml(starting_config(given, {}, "s"), "x")[0].data
    assert (data["model"], data["data"]["train"], data["output"]) == ("1e4", "no # comment", "x: y")
    monkeypatch.setattr(stage, "shown", str)
    assert parse_yaml(starting_config({**given, "output": "x"}, {}, "s"), "x")[0].data["model"] == 1e4


def comments_of(text):
    """Comments behind values, and blocks of comment lines, each as one text."""
    lines = [line.strip().removeprefix("# ").strip() for line in text.splitlines()]
    return [part for line in lines for part in line.split("  # ")[1:]]


def check_whole_sentences():
    given = {"stage": "sft", "model": "m", "data.train": "d.json", "output": "o", "optim.lr": 1e-4}
    found = comments_of(starting_config(given, {}, "s"))
    assert len(found) > 8
    assert [one for one in found if not one.endswith(".")] == []
    assert all(any(one in " ".join(key.help.split()) for key in all_keys().values()) for one in found)


def test_comments_are_whole_sentences_and_cut_to_the_width_they_are_not(monkeypatch):
    check_whole_sentences()

    def cut(line, key):
        return [f"{line:<24}  # {textwrap.shorten(key.help, 60, placeholder=' …')}"]

    monkeypatch.setattr(stage, "_explained", cut)
    with pytest.raises(AssertionError):
        check_whole_sentences()
