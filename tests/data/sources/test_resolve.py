"""What a path means: one file, a folder, an entry of dataset_info.json; each found, hashed and not parsed."""

from __future__ import annotations

import json
import os
import socket
from contextlib import chdir
from pathlib import Path

import pytest

from helpers.faults import raises_fault
from surefoot.data.sources import dataset_info as described
from surefoot.data.sources import records as files
from surefoot.data.sources import resolve as sources
from surefoot.data.sources.hub_files import TO_EVALUATE, Chosen
from surefoot.data.sources.records import parse_rows
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.system.errors import InputError
from surefoot.system.locations import data_kind

INSTRUCT = Path(__file__).parents[4] / "shared" / "data" / "instruct"
ALPACA = [{"instruction": f"q{number}", "input": "", "output": f"a{number}", "system": "s"} for number in range(9)]
needs_shared_data = pytest.mark.skipif(not INSTRUCT.is_dir(), reason="the shared data sets are not on this machine")


@pytest.fixture
def folder(tmp_path):
    def write(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path)

    return write


def open_one(path, **wishes):
    (source,) = open_sources(SourceSpec(str(path), **wishes))
    return source


def read_all(path, **wishes):
    return [parse_rows(source) for source in open_sources(SourceSpec(str(path), **wishes))]


def fault_of(path, **wishes) -> str:
    with pytest.raises(InputError) as caught:
        read_all(path, **wishes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sock(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)  # a socket's name may have 108 bytes, and a test's folder has a long one


class TestNoFiles:
    """Nobody writes into these FIFOs: whoever opens one waits for ever."""

    @pytest.mark.parametrize("make", [fifo, sock])
    def test_data_that_is_no_file_is_refused_unread(self, tmp_path, make):
        make(tmp_path / "a.jsonl")
        expected = f"{tmp_path}/a.jsonl: is not a regular file; save its content to a file and use that"
        assert fault_of(tmp_path / "a.jsonl") == expected

    def test_so_is_one_that_a_description_names(self, folder):
        path = folder({"dataset_info.json": {"it": {"file_name": "a.jsonl"}}})
        fifo(Path(path) / "a.jsonl")
        assert f"{path}/a.jsonl: is not a regular file" in fault_of(path, name="it")

    def test_so_is_a_description(self, folder):
        path = folder({"a.json": ALPACA})
        fifo(Path(path) / "dataset_info.json")
        assert f"{path}/dataset_info.json: is not a regular file" in fault_of(path, name="it")

    def test_a_link_to_one_is_seen_through(self, tmp_path):
        fifo(tmp_path / "pipe")
        (tmp_path / "a.jsonl").symlink_to(tmp_path / "pipe")
        assert "is not a regular file" in fault_of(tmp_path / "a.jsonl")

    def test_twin_without_the_look_it_is_opened(self, tmp_path, monkeypatch):
        class Opened(Exception):
            pass

        def would_wait(path):
            raise Opened

        fifo(tmp_path / "a.jsonl")
        monkeypatch.setattr(files.durable, "sha256_file", would_wait)
        assert "is not a regular file" in fault_of(tmp_path / "a.jsonl")
        monkeypatch.setattr(files, "require_file", lambda path, name: None)
        with pytest.raises(Opened):
            open_one(tmp_path / "a.jsonl")


class TestFolders:
    def test_all_data_files_by_name_and_nothing_else(self, folder):
        other = {".c.json": [], "README.md": "", "d/e.json": [], "LICENSE-2.0.txt": "MIT", "readme.txt": "x"}
        path = folder({"b.json": [{"text": "x"}], "a.json": [{"text": "y"}], **other})
        sources = open_sources(SourceSpec(path))
        assert [source.name for source in sources] == [f"{path}/a.json", f"{path}/b.json"]
        assert [parse_rows(source)[0].value for source in sources] == [{"text": "y"}, {"text": "x"}]

    def test_the_test_split_and_prose_are_not_trained_on(self, folder):
        path = folder({"train.jsonl": '{"text": "a"}', "test.jsonl": '{"text": "b"}', "LICENSE.txt": "All rights."})
        source = open_one(path)
        assert source.name == f"{path}/train.jsonl"
        assert source.notes == ("of the folder, split train: seen from the file names",)
        assert open_one(path, split="test").name == f"{path}/test.jsonl"
        assert fault_of(path, split="dev") == f"{path}: has no split 'dev'; it has test, train"

    def test_twin_without_the_rules_all_three_would_be_read(self, folder, monkeypatch):
        everything = lambda name, files, *_: Chosen(tuple(files), "", "")  # noqa: E731
        monkeypatch.setattr(sources, "choose_files", everything)
        monkeypatch.setattr(sources, "is_data", data_kind)
        with pytest.raises(ValueError, match="too many values"):
            self.test_the_test_split_and_prose_are_not_trained_on(folder)

    @pytest.mark.parametrize(
        ("files", "chosen"),
        [
            (("train", "test"), "test"),
            (("train", "valid", "test"), "valid"),
            (("a", "test"), "test"),
            (("a",), "a"),
        ],
    )
    def test_what_is_evaluated_is_not_what_is_trained_on(self, folder, files, chosen):
        path = folder({f"{name}.jsonl": '{"text": "a"}' for name in files})
        assert open_one(path, split=TO_EVALUATE).name == f"{path}/{chosen}.jsonl"

    def test_twin_without_such_a_split_it_is_refused(self, folder):
        path = folder({"train.jsonl": '{"text": "a"}'})
        assert fault_of(path, split=TO_EVALUATE) == (
            f"{path}: has no split 'validation' or 'test'; it has train; name the one you mean in split"
        )

    def test_what_shows_no_split_beside_one_that_does_is_said(self, folder):
        path = folder({"a.json": ALPACA, "test.json": ALPACA})
        assert fault_of(path) == f"{path}: has no split 'train'; it has test; a.json shows no split"
        path = folder({"train.json": ALPACA})
        assert open_one(path).notes == (
            "of the folder, split train: seen from the file names; not read: a.json shows no split",
        )

    def test_one_kind_is_read_and_the_others_named(self, folder):
        path = folder({"a.json": ALPACA, "a.csv": "text\nx\n"})
        source = open_one(path)
        assert source.name == f"{path}/a.json"
        assert "its .csv files are ignored, .json is preferred" in source.notes[0]

    def test_deeper_files_are_pointed_at(self, folder):
        path = folder({"train/a.json": ALPACA, "test/a.json": ALPACA})
        assert fault_of(path) == f"{path}: has no data file; did you mean {path}/test or {path}/train?"

    def test_a_description_needs_a_name(self, folder):
        path = folder(
            {"a.json": ALPACA, "dataset_info.json": {"one": {"file_name": "a.json"}, "two": {"file_name": "b"}}}
        )
        assert fault_of(path) == f"{path}: has a dataset_info.json with 2 entries; set name to one of one, two"

    def test_a_description_of_the_datasets_library_is_none(self, folder):
        path = folder({"a.json": ALPACA, "dataset_info.json": {"builder_name": "json", "splits": {}}})
        assert len(open_sources(SourceSpec(path))) == 1
        assert "no dataset_info.json, so there is no entry 'x'" in fault_of(path, name="x")


class TestLaziness:
    def test_opening_does_not_parse(self, folder):
        path = folder({"a.json": "not JSON"})
        source = open_one(f"{path}/a.json")
        with raises_fault("SF-DATA-ROW", f"{source.name}:1:1"):
            parse_rows(source)

    def test_a_file_that_changes_in_between_is_refused(self, folder):
        path = folder({"a.json": ALPACA})
        source = open_one(f"{path}/a.json")
        folder({"a.json": ALPACA[1:]})
        with raises_fault("SF-DATA-FILE", source.name):
            parse_rows(source)

    def test_twin_an_unchanged_file_is_read(self, folder):
        path = folder({"a.json": ALPACA})
        source = open_one(f"{path}/a.json")
        folder({"a.json": ALPACA})
        assert len(parse_rows(source)) == len(ALPACA)


class TestColumns:
    def test_fields_come_under_the_layouts_names(self, folder):
        path = folder({"a.json": [{"question": "q", "answer": "a", "id": 1}, {"question": "q", "id": 2}]})
        source = open_one(f"{path}/a.json", columns={"instruction": "question", "output": "answer"})
        assert [row.value for row in parse_rows(source)] == [
            {"instruction": "q", "output": "a", "id": 1},
            {"instruction": "q", "id": 2},
        ]

    def test_two_fields_can_change_places(self, folder):
        path = folder({"a.json": [{"instruction": "a", "output": "q"}]})
        source = open_one(f"{path}/a.json", columns={"instruction": "output", "output": "instruction"})
        assert parse_rows(source)[0].value == {"instruction": "q", "output": "a"}

    def test_a_column_hides_the_field_whose_name_it_takes(self, folder):
        path = folder({"a.json": [{"output": "old", "answer": "new"}]})
        assert parse_rows(open_one(f"{path}/a.json", columns={"output": "answer"}))[0].value == {"output": "new"}

    def test_a_missing_one_is_named_with_its_neighbours(self, folder):
        path = folder({"a.json": [{"question": "q", "answer": "a"}]})
        assert fault_of(f"{path}/a.json", columns={"instruction": "questoin"}) == (
            f"{path}/a.json: no record has the column 'questoin' (set for 'instruction'); did you mean 'question'?"
        )

    def test_one_that_is_named_like_the_field_is_missed_as_well(self, folder):
        path = folder({"a.json": [{"conversations": [], "chosen": "a"}]})
        assert fault_of(f"{path}/a.json", columns={"prompt": "prompt", "completion": "chosen"}) == (
            f"{path}/a.json: no record has the column 'prompt' (set for 'prompt'); it has 'conversations', 'chosen'"
        )

    def test_they_are_part_of_the_identity(self, folder):
        path = folder({"a.json": [{"question": "q", "answer": "a"}]})
        plain = open_one(f"{path}/a.json")
        renamed = open_one(f"{path}/a.json", columns={"output": "answer"})
        assert plain.sha256 == renamed.sha256
        assert plain.identity != renamed.identity


class TestDescriptions:
    """Entries of dataset_info.json, as LLaMA-Factory reads them."""

    @pytest.fixture
    def entry(self, folder):
        def write(entry, records=ALPACA):
            return folder({"a.json": records, "dataset_info.json": {"it": entry}})

        return write

    def read(self, path, **wishes):
        return [row.value for row in parse_rows(open_one(path, name="it", **wishes))]

    def test_without_columns_only_the_usual_ones_are_read(self, entry):
        path = entry({"file_name": "a.json"})
        assert open_one(path, name="it").format == "alpaca"
        assert self.read(path)[0] == {"instruction": "q0", "input": "", "output": "a0"}

    def test_with_columns_only_these_are_read(self, entry):
        path = entry(
            {"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output", "system": "system"}}
        )
        assert self.read(path)[0] == {"instruction": "q0", "output": "a0", "system": "s"}

    def test_twin_that_keeps_what_is_not_listed(self, entry, monkeypatch):
        monkeypatch.setitem(described._USUAL["alpaca"], "system", "system")
        with pytest.raises(AssertionError):
            self.test_without_columns_only_the_usual_ones_are_read(entry)

    def test_sharegpt_with_tags(self, entry):
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        records = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": "[]"}
        ]
        given = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
        path = entry(given, records)
        source = open_one(path, name="it")
        assert (source.format, source.tags) == ("sharegpt", tags)
        assert self.read(path) == [{"conversations": records[0]["messages"]}]

    def test_openai_in_its_own_words_is_the_messages_format(self, entry):
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        given = {"file_name": "a.json", "formatting": "openai", "columns": {"messages": "messages"}}
        assert open_one(entry(given), name="it").format == "messages"
        assert open_one(entry(given | {"tags": tags}), name="it").tags == {}
        other = open_one(entry(given | {"tags": tags | {"user_tag": "client"}}), name="it")
        assert (other.format, other.tags["user_tag"], dict(other.columns)) == (
            "sharegpt",
            "client",
            {"conversations": "messages"},
        )

    def test_num_samples_picks_the_same_records_every_time_and_not_the_first(self, entry):
        path = entry({"file_name": "a.json", "num_samples": 4})
        picked = self.read(path)
        assert picked == self.read(path)
        assert len(picked) == 4
        assert picked == sorted(picked, key=lambda record: record["instruction"])  # in the order of the file
        assert picked != self.read(entry({"file_name": "a.json"}))[:4]

    def test_the_spec_goes_before_the_entry(self, entry):
        path = entry({"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}})
        assert self.read(path, columns={"instruction": "input", "output": "output"})[0]["instruction"] == ""
        assert "has the format alpaca, but the config says sharegpt" in fault_of(path, name="it", format="sharegpt")

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"num_samples": 10}, "num_samples is 10, but there are only 9 records"),
            ({"ranking": True}, "is preference data (ranking)"),
            ({"columns": {"prompt": "instruction", "kto_tag": "label"}}, "is preference data (kto_tag)"),
            (
                {"columns": {"prompt": "instruction", "videos": "videos"}},
                "has videos, but surefoot only reads texts and pictures",
            ),
            ({"columns": {"promt": "instruction"}}, "columns has the unknown key 'promt'"),
            ({"colums": {}}, "unknown: colums; did you mean columns?"),
            ({"file_name": "../a.json"}, "leaves the folder"),
            ({"file_name": "/etc/passwd"}, "leaves the folder"),
            ({"file_name": "C:\\a.json"}, "leaves the folder"),
            ({"file_name": "b.json"}, "no such file"),
            ({"formatting": "chatml"}, "formatting is 'chatml', not one of alpaca, sharegpt, openai"),
            ({"formatting": ["alpaca"]}, "formatting is ['alpaca'], not one of alpaca, sharegpt, openai"),
            ({"formatting": {}}, "formatting is {}, not one of alpaca, sharegpt, openai"),
            ({"formatting": None}, "formatting is None, not one of alpaca, sharegpt, openai"),
            ({"columns": ["prompt"]}, "columns is ['prompt'], not an object of texts"),
            ({"tags": 3}, "tags is 3, not an object of texts"),
            ({"file_name": ["a.json"]}, "file_name is ['a.json'], not a text"),
            ({"num_samples": True}, "num_samples is True, not a number"),
            ({"tags": {"rol_tag": "x"}}, "tags has 'rol_tag'"),
            ({"split": "test"}, "split is for data sets on the hub"),
        ],
    )
    def test_what_is_refused(self, entry, given, says):
        assert says in fault_of(entry({"file_name": "a.json"} | given), name="it")

    @pytest.mark.parametrize("named", ["sub/a.json", "sub"])
    @pytest.mark.parametrize("link", ["a.json", "sub"])
    def test_a_link_does_not_leave_the_folder(self, folder, link, named):
        folder({"out/a.json": ALPACA, "in/dataset_info.json": {"it": {"file_name": named}}})
        path = Path(folder({"in/sub/b.json": ALPACA} if link == "a.json" else {})) / "in"
        if link == "a.json":
            (path / "sub" / "a.json").symlink_to(path.parent / "out" / "a.json")
        else:
            (path / "sub").symlink_to(path.parent / "out")
        assert "is, or contains, a link out of the folder of the description" in fault_of(path, name="it")

    def test_twin_a_link_within_it_is_followed(self, folder):
        path = Path(folder({"a.json": ALPACA, "dataset_info.json": {"it": {"file_name": "b.json"}}}))
        (path / "b.json").symlink_to(path / "a.json")
        assert len(parse_rows(open_one(path, name="it"))) == len(ALPACA)

    @pytest.mark.parametrize("key", ["script_url", "ms_hub_url", "om_hub_url", "cloud_file_name"])
    def test_places_that_are_not_read(self, entry, key):
        line = fault_of(entry({key: "org/name"}), name="it")
        assert f"({key})" in line
        assert "file_name" in line

    def test_a_name_that_is_not_there(self, entry):
        assert "has no entry 'its'; did you mean it?" in fault_of(entry({"file_name": "a.json"}), name="its")


@needs_shared_data
class TestSharedDescription:
    @pytest.mark.parametrize(
        ("name", "layout", "fields"),
        [
            ("identity", "alpaca", {"instruction", "input", "output"}),
            ("alpaca_en_demo", "alpaca", {"instruction", "input", "output"}),
            ("sharegpt_multiturn_200", "sharegpt", {"conversations", "tools"}),
        ],
    )
    def test_entries_to_train_on(self, name, layout, fields):
        source = open_one(INSTRUCT, name=name)
        assert source.format == layout
        assert {field for row in parse_rows(source) for field in row.value} <= fields

    @pytest.mark.parametrize(("name", "mark"), [("dpo_en_demo", "ranking"), ("kto_en_demo", "kto_tag")])
    def test_preferences_are_refused(self, name, mark):
        assert f"is preference data ({mark})" in fault_of(INSTRUCT, name=name)


def test_a_file_larger_than_the_memory_is_refused_unhashed(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b" " * 11)
    monkeypatch.setattr(files, "host_memory", lambda: (10, 10))
    monkeypatch.setattr(files.durable, "sha256_file", None)
    with raises_fault("SF-MEMORY", f"{tmp_path}/a.jsonl"):
        open_sources(SourceSpec(str(tmp_path / "a.jsonl")))


def test_twin_one_that_the_memory_holds_is_hashed(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b" " * 10)
    monkeypatch.setattr(files, "host_memory", lambda: (10, 10))
    monkeypatch.setattr(files.durable, "sha256_file", lambda path: "hashed")
    assert open_sources(SourceSpec(str(tmp_path / "a.jsonl")))[0].sha256 == "hashed"
