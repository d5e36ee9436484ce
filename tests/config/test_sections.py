"""Sources of examples: every way to write them means the same, and what is wrong in one is shown in that one."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers.configs import write_config
from surefoot.config import load, problems
from surefoot.config.dump import dump_config, plain_config
from surefoot.config.load import load_config
from surefoot.config.resume_policy import diff_configs
from surefoot.config.schema import RunConfig
from surefoot.config.sections import DataConfig, SourceConfig
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


GALLERY = Path(__file__).resolve().parents[1] / "golden" / "messages" / "sections.txt"


def config_of(**data: Any) -> RunConfig:
    return RunConfig.model_validate({"stage": "sft", "model": "a/b", "data": data, "output": "runs/x"})


def faults(folder: Path, data: str, *overrides: str, **changes: str) -> list[str]:
    """Messages for `data: …` in line 4 with "T" for the folder of the files, which is left out of the messages."""
    (folder / "nothing").mkdir(exist_ok=True)
    path = write_config(folder, data=data.replace("T/", f"{folder}/"), **changes)
    try:
        load_config(path, overrides)
    except InputError as error:
        return [f"[{fault.code}] {fault}".replace(f"{folder}/", "") for fault in error.faults]
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


MISTAKES = [  # data: …
    "{train: []}",
    "{train: 3}",
    "{train: [3]}",
    "{train: {weight: 2}}",
    "{train: [{weight: 2}]}",
    "{train: {path: T/train.jsonl, wieght: 2}}",
    "{train: [T/train.jsonl, {path: T/train.jsonl, wieght: 2}]}",
    "{train: [{path: T/train.jsonl, weight: -1}, {path: T/train.jsonl, weight: 0}]}",
    "{train: [{path: T/train.jsonl, format: alpcaa}]}",
    "{train: [{path: T/train.jsonl, columns: body}]}",
    "{train: [T/train.jsonl, T/gone.csv]}",
    "{train: T/train.jsonl, eval: {path: T/train.jsonl, weight: x}}",
    "{train: {path: T/train.jsonl, split: test}}",
    "{train: [{path: org/name, name: x}]}",
    "{train: {path: T/train.jsonl, name: x}}",
    "{train: data/gone.jsonl}",
    "{train: T/nothing}",
    "{train: [{path: T/train.jsonl, weight: 1}, {path: T/heldout.jsonl, epochs: 2}]}",
    "{train: {path: T/train.jsonl, weight: 1, epochs: 2}}",
    "{train: {path: org/name, streaming: true}}",
    "{train: T/train.jsonl, eval: {path: T/heldout.jsonl, epochs: 2}}",
]
MISSES = [
    "data.train.weight=2",
    "data.train[2].weight=2",
    "data.train[1].weight=0",
    "data.train[1].wieght=1",
]  # overrides of a list of two


def gallery() -> str:
    """The messages for configs in this folder."""
    found = []
    for data in MISTAKES:
        found += [data, *(f"    {message}" for message in faults(Path(), data))]
    for override in MISSES:
        found += [override, *(f"    {message}" for message in faults(Path(), "{train: [a/b, c/d]}", override))]
    return "\n".join(found) + "\n"


def test_a_mistake_is_shown_in_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place that quotes them; `PYTHONPATH=src:tests python tests/config/test_sections.py` writes it."""
    monkeypatch.chdir(tmp_path)
    assert gallery() == GALLERY.read_text()


def test_a_folder_has_splits_and_no_subsets(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test.jsonl").touch()
    assert faults(tmp_path, "{train: {path: T/folder, split: test}}") == []
    (message,) = faults(tmp_path, "{train: {path: T/folder, subset: en}}")
    assert message.split(": ")[1] == "data.train.subset"


def test_twin_without_numbers_the_second_source_would_be_blamed_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "shown_key", problems.schema_key)
    assert gallery() != GALLERY.read_text()


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


def test_later_faults_are_shown_at_their_source(tmp_path: Path) -> None:
    loaded = load_config(write_config(tmp_path, data="{train: [a/b, {path: c/d}]}"))
    assert loaded.origins["data.train.1.path"] == f"{loaded.path}:4"
    assert loaded.origins["data.train.0.path"] == f"{loaded.path}:4"
    (where, line, column) = loaded.locate(Fault("data.train[1].path", "is gone")).where.split(":")
    assert (where, line, column) == (loaded.path, "4", "28")
    assert loaded.locate(Fault("data.train", "is gone")).where == f"{loaded.path}:4:15"


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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        GALLERY.write_text(gallery())
