"""Sources of examples: every way to write them means the same, and what is wrong in one is shown in that one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.configs import write_config
from surefoot.config import load, problems
from surefoot.config.dump import dump_config, plain_config
from surefoot.config.load import load_config
from surefoot.config.resume_policy import diff_configs
from surefoot.config.schema import DataConfig, RunConfig
from surefoot.config.sections import SourceConfig
from surefoot.system.errors import Fault, InputError

FORMS: list[tuple[Any, tuple[SourceConfig, ...], Any]] = [  # as written, as read, as saved
    ("a.json", (SourceConfig(path="a.json"),), "a.json"),
    (["a.json"], (SourceConfig(path="a.json"),), "a.json"),
    ({"path": "a.json"}, (SourceConfig(path="a.json"),), "a.json"),
    ({"path": "a.json", "weight": 2}, (SourceConfig(path="a.json", weight=2.0),), {"path": "a.json", "weight": 2.0}),
    (
        ["a.json", {"path": "b.csv", "columns": {"text": "body"}}],
        (SourceConfig(path="a.json"), SourceConfig(path="b.csv", columns={"text": "body"})),
        ["a.json", {"path": "b.csv", "columns": {"text": "body"}}],
    ),
]


def config_of(**data: Any) -> RunConfig:
    return RunConfig.model_validate({"stage": "sft", "model": "a/b", "data": data, "output": "runs/x"})


def faults(folder: Path, data: str, *overrides: str, **changes: str) -> list[str]:
    """Messages for `data: …` in line 4 with "T" for the folder of the files, which is left out of the messages."""
    (folder / "nothing").mkdir(exist_ok=True)
    path = write_config(folder, data=data.replace("T/", f"{folder}/"), **changes)
    try:
        load_config(path, overrides)
    except InputError as error:
        return [str(fault).replace(f"{folder}/", "") for fault in error.faults]
    return []


@pytest.mark.parametrize(("written", "read", "saved"), FORMS, ids=str)
def test_all_forms_of_sources(written: Any, read: tuple[SourceConfig, ...], saved: Any) -> None:
    config = config_of(train=written, eval=written)
    assert config.data.train == config.data.eval == read
    assert plain_config(config)["data"]["train"] == plain_config(config)["data"]["eval"] == saved


@pytest.mark.parametrize("evaluation", ["none", 0.1, 8])
def test_what_evaluation_may_be_besides(evaluation: Any) -> None:
    config = config_of(train="a.json", eval=evaluation)
    assert config.data.eval == evaluation
    assert type(config.data.eval) is type(evaluation)


def test_a_file_called_none_is_not_no_file() -> None:
    config = config_of(train="none", eval={"path": "none"})
    assert config.data.eval == (SourceConfig(path="none"),)
    assert RunConfig.model_validate(plain_config(config)) == config


WRONG = {  # data: … -> the messages; column 7 is where the value starts
    "{train: []}": ["run.yaml:4:15: data.train: expected text, a group of keys or a list of these, got [] (a list); "],
    "{train: 3}": ["run.yaml:4:15: data.train: expected text, a group of keys or a list of these, got 3 "],
    "{train: [3]}": ["run.yaml:4:16: data.train[0]: expected "],
    "{train: {weight: 2}}": [
        "run.yaml:4:8: data.train.path: is required; add `path: data/train.jsonl` under data.train"
    ],
    "{train: [{weight: 2}]}": ["run.yaml:4:16: data.train[0].path: is required; "],
    "{train: {path: T/train.jsonl, wieght: 2}}": ["run.yaml:4:X: data.train.wieght: unknown key; did you mean weight?"],
    "{train: [T/train.jsonl, {path: T/train.jsonl, wieght: 2}]}": [
        "run.yaml:4:X: data.train[1].wieght: unknown key; did you mean weight?"
    ],
    "{train: [{path: T/train.jsonl, weight: -1}, {path: T/train.jsonl, weight: 0}]}": [
        "run.yaml:4:X: data.train[0].weight: expected a number greater than 0 or null, got -1 (a whole number); ",
        "run.yaml:4:X: data.train[1].weight: expected a number greater than 0 or null, got 0 (a whole number); ",
    ],
    "{train: [{path: T/train.jsonl, format: alpcaa}]}": [
        "run.yaml:4:X: data.train[0].format: expected auto, alpaca, sharegpt, messages, prompt-completion, text"
    ],
    "{train: [{path: T/train.jsonl, columns: body}]}": [
        "run.yaml:4:X: data.train[0].columns: expected names for names, such as {instruction: question, output"
    ],
    "{train: [T/train.jsonl, T/gone.csv]}": ["run.yaml:4:X: data.train[1].path: file gone.csv does not exist"],
    "{train: T/train.jsonl, eval: {path: T/train.jsonl, weight: x}}": [
        "run.yaml:4:X: data.eval.weight: expected a number greater than 0 or null, got 'x' (text)"
    ],
    "{train: {path: T/train.jsonl, split: test}}": [
        "run.yaml:4:X: data.train.split: is for data sets on the hub, and train.jsonl is a path on this machine; "
    ],
    "{train: [{path: org/name, name: x}]}": ["run.yaml:4:X: data.train[0].name: names an entry of a folder's dataset_"],
    "{train: {path: T/train.jsonl, name: x}}": [
        "run.yaml:4:X: data.train.name: names an entry of a folder's dataset_i"
    ],
    "{train: data/gone.jsonl}": ["run.yaml:4:15: data.train.path: file data/gone.jsonl does not exist"],
    "{train: T/nothing}": ["run.yaml:4:15: data.train.path: folder nothing has no data file; put "],
    "{train: [{path: T/train.jsonl, weight: 1}, {path: T/heldout.jsonl, epochs: 2}]}": [
        "run.yaml:4:X: data.train[0].weight: a mixture is given either by weights or by epochs, "
        "and data.train[1].epochs is set too; "
    ],
    "{train: {path: T/train.jsonl, weight: 1, epochs: 2}}": [
        "run.yaml:4:X: data.train.weight: a mixture is given either"
    ],
    "{train: {path: org/name, streaming: true}}": ["run.yaml:4:X: data.train.streaming: a stream has no end that "],
    "{train: T/train.jsonl, eval: {path: T/heldout.jsonl, epochs: 2}}": ["run.yaml:4:X: data.eval.epochs: evaluation "],
}


def check_mistakes(folder: Path, data: str, expected: list[str]) -> None:
    found = faults(folder, data)
    assert len(found) == len(expected), found
    line = f"data: {data.replace('T/', f'{folder}/')}"
    for message, start in zip(found, expected, strict=True):
        place, _, text = start.partition(": ")
        if place.endswith(":X"):  # the key itself, or its value
            column = int(message.split(":")[2])
            name = text.split(":")[0].rpartition(".")[2]
            assert line[column - 1 :].startswith(name) or line[: column - 1].endswith(f"{name}: ") or name == "path"
            place = f"{place[:-1]}{column}"
        assert message.startswith(f"{place}: {text}")


@pytest.mark.parametrize(("data", "expected"), WRONG.items(), ids=str)
def test_a_mistake_is_shown_in_its_own_source(tmp_path: Path, data: str, expected: list[str]) -> None:
    check_mistakes(tmp_path, data, expected)


def test_a_folder_has_splits_and_no_subsets(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test.jsonl").touch()
    assert faults(tmp_path, "{train: {path: T/folder, split: test}}") == []
    assert (
        "data.train.subset: is for data sets on the hub" in faults(tmp_path, "{train: {path: T/folder, subset: en}}")[0]
    )


def test_twin_without_numbers_the_second_source_would_be_blamed_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "shown_key", problems.schema_key)
    with pytest.raises(AssertionError):
        check_mistakes(tmp_path, *list(WRONG.items())[6])


GOOD = [
    "{train: org/name}",
    "{train: [{path: org/name, columns: {output: answer}}]}",  # a list of one is saved without its list
    "{train: {path: org/name, subset: main, split: 'train[:10%]', revision: v1, streaming: true, max_samples: 8}}",
    "{train: {path: org/name, streaming: true}, max_samples: 8}",
    "{train: T/}",
    "{train: [T/train.jsonl, {path: T/heldout.jsonl, weight: 2}]}",
    "{train: T/train.jsonl, eval: [T/heldout.jsonl, T/train.jsonl]}",
]


@pytest.mark.parametrize("data", GOOD)
def test_what_is_fine(tmp_path: Path, data: str) -> None:
    assert faults(tmp_path, data) == []


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.txt", "a.parquet", "a.jsonl.gz", "a.CSV", "b.parquet.gz", "b.zip"]
)
def test_suffixes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert (faults(tmp_path, f"{{train: T/{name}}}") == []) == name.startswith("a")


OVERRIDES: list[tuple[str, list[str], Any]] = [  # data.train in the file, overrides, data.train as saved
    ("a/b", ["data.train=c/d"], "c/d"),
    ("a/b", ["data.train.weight=2"], {"path": "a/b", "weight": 2.0}),
    ("a/b", ["data.train=[a/b,c/d]"], ["a/b", "c/d"]),
    ("a/b", ["data.train=[a/b,c/d]", "data.train[1].weight=2"], ["a/b", {"path": "c/d", "weight": 2.0}]),
    ("[a/b, c/d]", ["data.train.1.epochs=2"], ["a/b", {"path": "c/d", "epochs": 2.0}]),
    ("[a/b, c/d]", ["data.train[0]=e/f"], ["e/f", "c/d"]),
    ("{path: a/b, weight: 2}", ["data.train.path=c/d"], {"path": "c/d", "weight": 2.0}),
]


@pytest.mark.parametrize(("train", "overrides", "saved"), OVERRIDES)
def test_overrides_reach_into_lists(tmp_path: Path, train: str, overrides: list[str], saved: Any) -> None:
    config = load_config(write_config(tmp_path, data=f"{{train: {train}}}"), overrides).config
    assert plain_config(config)["data"]["train"] == saved


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "data.train.weight=2": "data.train is a list of 2; name one, such as data.train[0].weight",
        "data.train[2].weight=2": "data.train is a list of 2; count from 0",
        "data.train[1].weight=0": "data.train[1].weight: expected a number greater than 0 or null, got 0",
        "data.train[1].wieght=1": "data.train[1].wieght: unknown key; did you mean weight?",
    }.items(),
)
def test_overrides_that_miss_the_list(tmp_path: Path, override: str, message: str) -> None:
    (fault,) = faults(tmp_path, "{train: [a/b, c/d]}", override)
    assert fault.startswith(f"override {override}: {message}")


def test_later_faults_are_shown_at_their_source(tmp_path: Path) -> None:
    loaded = load_config(write_config(tmp_path, data="{train: [a/b, {path: c/d}]}"))
    assert loaded.origins["data.train.1.path"] == f"{loaded.path}:4"
    assert loaded.origins["data.train.0.path"] == f"{loaded.path}:4"
    (where, line, column) = loaded.locate(Fault("data.train[1].path", "is gone")).where.split(":")
    assert (where, line, column) == (loaded.path, "4", "28")
    assert loaded.locate(Fault("data.train", "is gone")).where == f"{loaded.path}:4:15"


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_config(tmp_path, data="{train: [~/train.jsonl, {path: ~/heldout.jsonl}], eval: ~/heldout.jsonl}")
    data = load_config(path).config.data
    assert isinstance(data.eval, tuple)
    assert [source.path for source in (*data.train, *data.eval)] == [
        f"{tmp_path}/{name}.jsonl" for name in ("train", "heldout", "heldout")
    ]


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("a.json", "b.json", [("data.train.path", "free")]),
        ("a.json", {"path": "b.json", "weight": 2}, [("data.train.path", "free"), ("data.train.weight", "refused")]),
        (["a.json", "b.json"], ["a.json", {"path": "b.json", "epochs": 2}], [("data.train[1].epochs", "refused")]),
        (["a.json", "b.json"], ["b.json"], [("data.train", "refused")]),
        ({"path": "a.json", "format": "auto"}, "a.json", []),
    ],
)
def test_what_a_resumed_run_allows(old: Any, new: Any, changes: list[tuple[str, str]]) -> None:
    found = diff_configs(plain_config(config_of(train=old)), plain_config(config_of(train=new)))
    assert [(change.key, change.policy) for change in found] == changes


def test_the_saved_form_is_the_shortest(tmp_path: Path) -> None:
    config = config_of(train=["a.json", {"path": "b.csv", "weight": 0.5}])
    assert "  train:\n  - a.json\n  - {path: b.csv, weight: 0.5}\n" in dump_config(config)
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(config_of(train="a/b")))
    assert load_config(saved).config.data == DataConfig(train=(SourceConfig(path="a/b"),))
