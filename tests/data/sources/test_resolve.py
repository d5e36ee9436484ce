"""What a path means: one file, a folder, an entry of dataset_info.json; each found, hashed and not parsed."""

from __future__ import annotations

import json
import os
import socket
from contextlib import chdir
from pathlib import Path

import pytest

from helpers.faults import gives, raises_fault
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


DESCRIPTION = "SF-DATA-DESCRIPTION"


def refuses(code, where, *values, path, remedy=(), **wishes) -> None:
    """Reading `path` must end with this fault, see `raises_fault`."""
    with raises_fault(code, where, *values, remedy=remedy):
        read_all(path, **wishes)


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
        refuses("SF-DATA-FILE", tmp_path / "a.jsonl", path=tmp_path / "a.jsonl")

    def test_so_is_one_that_a_description_names(self, folder):
        path = folder({"dataset_info.json": {"it": {"file_name": "a.jsonl"}}})
        fifo(Path(path) / "a.jsonl")
        refuses("SF-DATA-FILE", f"{path}/a.jsonl", path=path, name="it")

    def test_so_is_a_description(self, folder):
        path = folder({"a.json": ALPACA})
        fifo(Path(path) / "dataset_info.json")
        refuses(DESCRIPTION, f"{path}/dataset_info.json", path=path, name="it")

    def test_a_link_to_one_is_seen_through(self, tmp_path):
        fifo(tmp_path / "pipe")
        (tmp_path / "a.jsonl").symlink_to(tmp_path / "pipe")
        refuses("SF-DATA-FILE", tmp_path / "a.jsonl", path=tmp_path / "a.jsonl")

    def test_twin_without_the_look_it_is_opened(self, tmp_path, monkeypatch):
        class Opened(Exception):
            pass

        def would_wait(path):
            raise Opened

        fifo(tmp_path / "a.jsonl")
        monkeypatch.setattr(files.durable, "sha256_file", would_wait)
        refuses("SF-DATA-FILE", tmp_path / "a.jsonl", path=tmp_path / "a.jsonl")
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
        (note,) = source.notes
        assert gives(note, "train")
        assert open_one(path, split="test").name == f"{path}/test.jsonl"
        refuses("SF-DATA-HUB", path, "'dev'", path=path, remedy=("test", "train"), split="dev")

    def test_twin_without_the_rules_all_three_would_be_read(self, folder, monkeypatch):
        everything = lambda name, files, *_: Chosen(tuple(files), "", "")  # noqa: E731
        monkeypatch.setattr(sources, "choose_files", everything)
        monkeypatch.setattr(sources, "is_data", data_kind)
        with pytest.raises(ValueError, match="unpack"):  # several files
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
        refuses("SF-DATA-HUB", path, "'validation'", "'test'", path=path, remedy=("train",), split=TO_EVALUATE)

    def test_what_shows_no_split_beside_one_that_does_is_said(self, folder):
        path = folder({"a.json": ALPACA, "test.json": ALPACA})
        refuses("SF-DATA-HUB", path, "'train'", path=path, remedy=("test", "a.json"))
        path = folder({"train.json": ALPACA})
        (note,) = open_one(path).notes
        assert [gives(note, value) for value in ("train", "a.json")] == [True, True]

    def test_one_kind_is_read_and_the_others_named(self, folder):
        path = folder({"a.json": ALPACA, "a.csv": "text\nx\n"})
        source = open_one(path)
        assert source.name == f"{path}/a.json"
        assert all(kind in source.notes[0] for kind in (".csv", ".json"))

    def test_deeper_files_are_pointed_at(self, folder):
        path = folder({"train/a.json": ALPACA, "test/a.json": ALPACA})
        refuses("SF-DATA-EMPTY", path, path=path, remedy=(f"{path}/test", f"{path}/train"))

    def test_a_description_needs_a_name(self, folder):
        path = folder(
            {"a.json": ALPACA, "dataset_info.json": {"one": {"file_name": "a.json"}, "two": {"file_name": "b"}}}
        )
        refuses(DESCRIPTION, path, 2, path=path, remedy=("one", "two"))

    def test_a_description_of_the_datasets_library_is_none(self, folder):
        path = folder({"a.json": ALPACA, "dataset_info.json": {"builder_name": "json", "splits": {}}})
        assert len(open_sources(SourceSpec(path))) == 1
        refuses(DESCRIPTION, path, "'x'", path=path, name="x")


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

    def test_a_missing_one_is_named_with_its_neighbors(self, folder):
        path = folder({"a.json": [{"question": "q", "answer": "a"}]})
        named, said, columns = f"{path}/a.json", ("'questoin'", "'instruction'"), {"instruction": "questoin"}
        refuses("SF-DATA-FORMAT", named, *said, path=named, remedy=("'question'",), columns=columns)

    def test_one_that_is_named_like_the_field_is_missed_as_well(self, folder):
        path = folder({"a.json": [{"conversations": [], "chosen": "a"}]})
        named, columns = f"{path}/a.json", {"prompt": "prompt", "completion": "chosen"}
        refuses("SF-DATA-FORMAT", named, "'prompt'", path=named, remedy=("'conversations'",), columns=columns)

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
        entry = f"{path}/dataset_info.json entry 'it'"
        refuses("SF-DATA-FORMAT", entry, "alpaca", "sharegpt", path=path, name="it", format="sharegpt")

    @pytest.mark.parametrize(
        ("given", "code", "said"),
        [
            ({"num_samples": 10}, "SF-DATA-SHARES", ("num_samples", 10, 9)),
            ({"ranking": True}, "SF-DATA-FORMAT", ("ranking",)),
            ({"columns": {"prompt": "instruction", "kto_tag": "label"}}, "SF-DATA-FORMAT", ("kto_tag",)),
            ({"columns": {"prompt": "instruction", "videos": "videos"}}, DESCRIPTION, ("videos",)),
            ({"columns": {"promt": "instruction"}}, DESCRIPTION, ("columns", "'promt'")),
            ({"colums": {}}, DESCRIPTION, ("colums",)),
            ({"file_name": "../a.json"}, DESCRIPTION, ("file_name", "../a.json")),
            ({"file_name": "/etc/passwd"}, DESCRIPTION, ("file_name", "/etc/passwd")),
            ({"file_name": "C:\\a.json"}, DESCRIPTION, ("file_name",)),
            ({"file_name": "b.json"}, "SF-FILE-MISSING", ()),
            ({"formatting": "chatml"}, DESCRIPTION, ("formatting", "'chatml'", "alpaca", "sharegpt", "openai")),
            ({"formatting": ["alpaca"]}, DESCRIPTION, ("formatting", "['alpaca']")),
            ({"formatting": {}}, DESCRIPTION, ("formatting", "{}")),
            ({"formatting": None}, DESCRIPTION, ("formatting", "None")),
            ({"columns": ["prompt"]}, DESCRIPTION, ("columns", "['prompt']")),
            ({"tags": 3}, DESCRIPTION, ("tags", 3)),
            ({"file_name": ["a.json"]}, DESCRIPTION, ("file_name", "['a.json']")),
            ({"num_samples": True}, DESCRIPTION, ("num_samples", "True")),
            ({"tags": {"rol_tag": "x"}}, DESCRIPTION, ("tags", "'rol_tag'")),
            ({"split": "test"}, DESCRIPTION, ("split",)),
        ],
    )
    def test_what_is_refused(self, entry, given, code, said):
        with pytest.raises(InputError) as caught:
            read_all(entry({"file_name": "a.json"} | given), name="it")
        (fault,) = caught.value.faults
        assert fault.code == code
        assert all(gives(str(fault), value) for value in said), fault

    @pytest.mark.parametrize("named", ["sub/a.json", "sub"])
    @pytest.mark.parametrize("link", ["a.json", "sub"])
    def test_a_link_does_not_leave_the_folder(self, folder, link, named):
        folder({"out/a.json": ALPACA, "in/dataset_info.json": {"it": {"file_name": named}}})
        path = Path(folder({"in/sub/b.json": ALPACA} if link == "a.json" else {})) / "in"
        if link == "a.json":
            (path / "sub" / "a.json").symlink_to(path.parent / "out" / "a.json")
        else:
            (path / "sub").symlink_to(path.parent / "out")
        refuses(DESCRIPTION, f"{path}/dataset_info.json entry 'it'", named, path=path, name="it")

    def test_twin_a_link_within_it_is_followed(self, folder):
        path = Path(folder({"a.json": ALPACA, "dataset_info.json": {"it": {"file_name": "b.json"}}}))
        (path / "b.json").symlink_to(path / "a.json")
        assert len(parse_rows(open_one(path, name="it"))) == len(ALPACA)

    @pytest.mark.parametrize("key", ["script_url", "ms_hub_url", "om_hub_url", "cloud_file_name"])
    def test_places_that_are_not_read(self, entry, key):
        path = entry({key: "org/name"})
        where = f"{path}/dataset_info.json entry 'it'"
        refuses(DESCRIPTION, where, key, path=path, remedy=("file_name",), name="it")

    def test_a_name_that_is_not_there(self, entry):
        path = entry({"file_name": "a.json"})
        refuses(DESCRIPTION, f"{path}/dataset_info.json", "'its'", path=path, remedy=("it",), name="its")


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
        where = f"{INSTRUCT}/dataset_info.json entry {name!r}"
        refuses("SF-DATA-FORMAT", where, mark, path=INSTRUCT, name=name)


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
