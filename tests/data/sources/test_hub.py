"""Data sets on the hub, read by the real client from a stub of the hub: files, commit, streaming, refusals."""

from __future__ import annotations

import gzip
import hashlib
import io
import json

import huggingface_hub
import pytest

from helpers.faults import gives, raises_fault
from helpers.hub_stub import BAD_TOKEN, GOOD_TOKEN, OUTSIDER, client_of, go_offline, point_at, serve
from surefoot.data.sources import hub as hub_rows
from surefoot.data.sources import hub_files
from surefoot.data.sources.hub_files import choose_files
from surefoot.data.sources.records import parse_rows
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.system import hub as hub_client
from surefoot.system.errors import EnvironmentFault, InputError

RECORDS = [{"instruction": f"q{number}", "output": f"a{number}" + "x" * 200} for number in range(2000)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
CONFIGS = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*.parquet}
  - {split: test, path: "main/test-*.parquet"}
- config_name: lines
  default: true
  data_files: "lines/**/*.jsonl"
---
# A data set
"""


def parquet(records) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the data extra")
    file = io.BytesIO()
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=100)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path):
    with serve(tmp_path / "hub") as stub:
        stub.add("datasets", "org/lines", {"train.jsonl": LINES, "test.jsonl": LINES[:500].rpartition("\n")[0]})
        yield stub


@pytest.fixture
def client(hub, tmp_path):
    with client_of(hub, tmp_path / "cache") as patch:
        yield patch


def read(path="org/lines", **wishes):
    return [row.value for source in open_sources(SourceSpec(path, **wishes)) for row in parse_rows(source)]


def noted(function, asked):
    """The function, noting its name and how long the client would wait for an answer now."""

    def call(*arguments, **keywords):
        asked.append((function.__name__, huggingface_hub.get_session().timeout.read))
        return function(*arguments, **keywords)

    return call


def refused(path="org/lines", **wishes):
    with pytest.raises((InputError, EnvironmentFault)) as caught:
        read(path, **wishes)
    (fault,) = caught.value.faults
    assert "\n" not in str(fault)
    assert not any(token in str(fault) for token in (GOOD_TOKEN, OUTSIDER, BAD_TOKEN))
    return caught.value.exit_code, fault.code, fault


class TestReading:
    def test_the_split_that_is_asked_for(self, hub, client):
        assert read() == RECORDS
        assert len(read(split="test")) == 2
        assert not [path for path in hub.asked if "GET" in path and path.endswith("test.jsonl")][1:]

    def test_names_commit_and_notes(self, hub, client):
        (source,) = open_sources(SourceSpec("org/lines"))
        assert source.name == "org/lines/train.jsonl"
        assert source.commit == hub.commit("datasets", "org/lines")
        (note,) = source.notes
        assert gives(note, "train")

    def test_subsets_as_the_readme_declares(self, hub, client):
        files = {"README.md": CONFIGS, "lines/a/b.jsonl": LINES, "main/train-0.parquet": parquet(RECORDS[:5])}
        hub.add("datasets", "org/many", {**files, "main/test-0.parquet": parquet(RECORDS[:3])})
        assert read("org/many") == RECORDS
        assert read("org/many", subset="main") == RECORDS[:5]
        assert read("org/many", subset="main", split="test") == RECORDS[:3]
        for wishes, wrong, there in (
            ({"subset": "mian"}, "'mian'", ("main", "lines")),
            ({"subset": "main", "split": "dev"}, "'dev'", ("train", "test")),
        ):
            *said, fault = refused("org/many", **wishes)
            assert (*said, fault.where) == (2, "SF-DATA-HUB", "org/many")
            assert gives(fault.what, wrong)
            assert all(gives(fault.fix, name) for name in there)

    def test_a_revision_that_moves_is_read_at_the_commit_that_was_recorded(self, hub, client):
        (before,) = open_sources(SourceSpec("org/lines"))
        hub.add("datasets", "org/lines", {"train.jsonl": LINES.upper()})
        (after,) = open_sources(SourceSpec("org/lines"))
        (again,) = open_sources(SourceSpec("org/lines", revision=before.commit))
        assert before.sha256 == again.sha256 != after.sha256

    def test_a_script_is_refused(self, hub, client):
        hub.add("datasets", "org/coded", {"coded.py": "raise SystemExit", "README.md": "text"})
        assert refused("org/coded")[:2] == (2, "SF-DATA-HUB")
        assert not [path for path in hub.asked if path.endswith("coded.py")]

    def test_an_entry_of_a_description_leads_to_the_hub(self, hub, client, tmp_path):
        (tmp_path / "dataset_info.json").write_text(json.dumps({"it": {"hf_hub_url": "org/lines", "split": "test"}}))
        (source,) = open_sources(SourceSpec(str(tmp_path), name="it"))
        assert (source.format, len(parse_rows(source))) == ("alpaca", 2)


class TestStreaming:
    def test_no_more_is_read_than_asked_for_and_nothing_is_stored(self, hub, client, tmp_path):
        client.setattr(hub_rows, "_BLOCK", 2**12)
        assert read(streaming=True, max_samples=5) == RECORDS[:5]
        assert hub.sent < len(LINES) / 10
        assert not list((tmp_path / "cache").rglob("*.jsonl"))

    def test_twin_without_streaming_everything_is_read(self, hub, client):
        read(max_samples=5)
        assert hub.sent >= len(LINES)

    def test_parquet(self, hub, client):
        client.setattr(hub_rows, "_BLOCK", 2**12)
        body = parquet(
            [record | {"noise": hashlib.shake_256(record["output"].encode()).hexdigest(200)} for record in RECORDS]
        )
        hub.add("datasets", "org/table", {"train.parquet": body})
        assert [record["instruction"] for record in read("org/table", streaming=True, max_samples=3)] == [
            "q0",
            "q1",
            "q2",
        ]
        assert hub.sent < len(body) / 2

    def test_several_files_count_as_one_stream(self, hub, client):
        hub.add(
            "datasets", "org/two", {f"train-0000{part}-of-00002.jsonl": json.dumps({"text": part}) for part in "01"}
        )
        (source,) = open_sources(SourceSpec("org/two", streaming=True, max_samples=2))
        assert [(row.number, row.line, row.value["text"]) for row in parse_rows(source)] == [(1, 1, "0"), (2, 2, "1")]

    def test_the_identity_is_the_commit_and_the_wish(self, hub, client):
        def identity(count):
            return open_sources(SourceSpec("org/lines", streaming=True, max_samples=count))[0].sha256

        assert identity(5) == identity(5) != identity(6)
        before = identity(5)
        hub.add("datasets", "org/lines", {"README.md": "new"})
        assert identity(5) != before

    def test_what_cannot_be_streamed(self, hub, client):
        hub.add("datasets", "org/list", {"train.json": json.dumps(RECORDS[:3])})
        assert refused("org/list", streaming=True, max_samples=2)[1] == "SF-DATA-HUB"
        assert gives(refused(streaming=True)[2].fix, "max_samples")

    def test_one_packed_file_among_others_cannot_be_streamed(self, hub, client):
        files = {"train-00000-of-00002.jsonl": LINES, "train-00001-of-00002.jsonl.GZ": gzip.compress(LINES.encode())}
        hub.add("datasets", "org/packed", files)
        _, code, fault = refused("org/packed", streaming=True, max_samples=2)
        assert (code, "00002.jsonl.GZ" in fault.what) == ("SF-DATA-HUB", True)
        del files["train-00001-of-00002.jsonl.GZ"]
        hub.add("datasets", "org/plain", files | {"train-00001-of-00002.jsonl": LINES})
        assert read("org/plain", streaming=True, max_samples=2) == RECORDS[:2]

    def test_a_broken_line_is_named(self, hub, client):
        hub.add("datasets", "org/bad", {"train.jsonl": '{"a": 1}\n{"a" 1}\n'})
        _, code, fault = refused("org/bad", streaming=True, max_samples=2)
        assert (code, fault.where) == ("SF-DATA-ROW", "org/bad/train.jsonl:2:6")

    @pytest.mark.parametrize(("file", "body"), [("train.jsonl", LINES), ("train.parquet", None)])
    def test_access_that_is_lost_on_the_way(self, hub, client, file, body):
        hub.add("datasets", "org/gone", {file: body or parquet(RECORDS)})
        (source,) = open_sources(SourceSpec("org/gone", streaming=True, max_samples=5))
        hub.gated = {"org/gone"}
        with raises_fault("SF-HUB-ACCESS", "org/gone"):
            parse_rows(source)


class TestRefusals:
    """In the same words as for models."""

    @pytest.mark.parametrize(
        ("token", "code", "says"),
        [
            (None, 3, "hf"),
            (BAD_TOKEN, 3, "token"),
            (OUTSIDER, 3, "https://huggingface.co/datasets/org/lines"),
        ],
    )
    def test_gated(self, hub, client, token, code, says):
        hub.gated = {"org/lines"}
        if token:
            client.setenv("HF_TOKEN", token)
        *said, fault = refused()
        assert said == [code, "SF-HUB-ACCESS"]
        assert gives(str(fault), says)

    def test_access(self, hub, client):
        hub.gated = {"org/lines"}
        client.setenv("HF_TOKEN", GOOD_TOKEN)
        assert read() == RECORDS

    @pytest.mark.parametrize(
        ("wishes", "code", "named"),
        [
            ({"path": "org/liens"}, "SF-HUB-MISSING", "org/liens"),
            ({"revision": "v9"}, "SF-HUB-MISSING", "'v9'"),
            ({"split": "trian"}, "SF-DATA-HUB", "'trian'"),
            ({"subset": "main"}, "SF-DATA-HUB", "'main'"),
        ],
    )
    def test_wrong_names(self, client, wishes, code, named):
        *said, fault = refused(**wishes)
        assert said == [2, code]
        assert gives(str(fault), named)

    def test_a_missing_file_with_a_suffix_is_no_hub_name(self, hub, client):
        assert refused("nowhere/train.jsonl")[1] == "SF-FILE-MISSING"
        assert hub.asked == []

    @pytest.mark.parametrize(("place", "status"), [("/api/", 500), ("/resolve/", 500), ("/resolve/", 503)])
    def test_a_hub_that_is_down(self, hub, client, place, status):
        client.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        hub.broken = {place: status}
        *said, fault = refused()
        assert said == [3, "SF-HUB-OFFLINE"]
        assert gives(fault.what, status)

    def test_silence(self, hub, client):
        client.setattr(hub_client, "_TIMEOUT", 0.1)
        hub.broken = {"/api/": "silence"}
        assert refused()[:2] == (3, "SF-HUB-OFFLINE")

    def test_offline(self, hub, client):
        read()
        hub.asked.clear()
        go_offline(client)
        assert read() == RECORDS
        assert refused(split="test")[1] == "SF-HUB-OFFLINE"
        assert refused("org/other")[0] == 3
        assert refused(streaming=True, max_samples=2)[0] == 3
        assert hub.asked == []

    def test_unreachable(self, client):
        point_at(client, "http://127.0.0.1:9")
        assert refused()[:2] == (3, "SF-HUB-OFFLINE")

    def test_a_download_that_is_cut_off(self, hub, client):
        client.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        hub.broken = {"train.jsonl": "cut"}
        assert refused()[:2] == (3, "SF-HUB-OFFLINE")

    def test_the_client_is_left_as_it_was(self, client):
        def state():
            return huggingface_hub.logging.get_verbosity(), huggingface_hub.get_session().timeout

        before = state()
        read()
        read(streaming=True, max_samples=5)
        assert state() == before

    def test_questions_end_and_downloads_take_their_time(self, client):
        asked = []
        client.setattr(huggingface_hub.HfApi, "list_repo_tree", noted(huggingface_hub.HfApi.list_repo_tree, asked))
        client.setattr(huggingface_hub, "snapshot_download", noted(huggingface_hub.snapshot_download, asked))
        read()
        assert asked == [
            ("snapshot_download", hub_client._PATIENCE),
            ("list_repo_tree", hub_client._PATIENCE),
            ("snapshot_download", None),
        ]


class TestACacheWithoutAListing:
    """As older clients and single downloads leave it: nothing says what else the commit holds."""

    @pytest.fixture
    def shards(self, hub, client, tmp_path):
        files = {f"train-0000{part}-of-00003.jsonl": json.dumps(RECORDS[part]) for part in range(3)}
        hub.add("datasets", "org/shards", files)
        huggingface_hub.hf_hub_download("org/shards", "train-00000-of-00003.jsonl", repo_type="dataset")
        assert not list((tmp_path / "cache").rglob("trees/*"))

    def check_a_part_is_no_whole(self):
        assert refused("org/shards")[:2] == (3, "SF-HUB-OFFLINE")

    def test_a_part_is_no_whole(self, shards, client):
        go_offline(client)
        self.check_a_part_is_no_whole()

    def test_twin_that_takes_what_there_is(self, shards, client):
        go_offline(client)
        client.setattr(hub_client, "_unlisted", lambda name, kind, folder: {path.name: 1 for path in folder.iterdir()})
        with pytest.raises(pytest.fail.Exception):
            self.check_a_part_is_no_whole()

    def test_the_hub_makes_up_for_it(self, shards):
        assert read("org/shards") == RECORDS[:3]


class TestChoice:
    """A pure function of names and README."""

    @pytest.mark.parametrize(
        ("files", "split", "chosen"),
        [
            (["a.jsonl", "b.jsonl"], "train", ["a.jsonl", "b.jsonl"]),
            (["train.csv", "valid.csv"], "validation", ["valid.csv"]),
            (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002-ab.parquet", "data/test-0.parquet"],
             "train", ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002-ab.parquet"]),
            (["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
             "train_sft", ["data/train_sft-00000-of-00001.parquet"]),
            (["default/train/0000.parquet", "default/test/0000.parquet"], "test", ["default/test/0000.parquet"]),
            (["train.parquet", "train.jsonl"], "train", ["train.parquet"]),
            (["train.jsonl", "dataset_infos.json", ".cache/x.json"], "train", ["train.jsonl"]),
            (["constrained.jsonl", "latest.jsonl"], "train", ["constrained.jsonl", "latest.jsonl"]),
        ],
    )  # fmt: skip
    def test_splits_from_names(self, files, split, chosen):
        assert list(choose_files("org/x", files, "", None, split).files) == chosen

    def test_what_is_left_out_is_said(self):
        reason = choose_files("org/x", ["train.parquet", "train.csv"], "", None, "train").reason
        assert all(kind in reason for kind in (".csv", ".parquet"))

    def test_several_folders_are_a_question(self):
        files = ["main/train.jsonl", "other/train.jsonl"]
        with raises_fault("SF-DATA-HUB", "org/x", remedy=["main", "other"]):
            choose_files("org/x", files, "", None, "train")
        assert choose_files("org/x", files, "", "other", "train").files == ("other/train.jsonl",)

    @pytest.mark.parametrize(
        ("files", "listed", "subset", "chosen"),
        [
            (["train.jsonl", "other/train.jsonl"], [".", "other"], ".", ["train.jsonl"]),
            (["data/train.jsonl", "other/train.jsonl"], [".", "other"], ".", ["data/train.jsonl"]),
            (
                ["data/en/train.jsonl", "data/de/train.jsonl"],
                ["data/de", "data/en"],
                "data/en",
                ["data/en/train.jsonl"],
            ),
            (["x/a/1.jsonl", "x/b/2.jsonl"], ["x/a", "x/b"], "x", ["x/a/1.jsonl", "x/b/2.jsonl"]),
            (["train/de/a.jsonl", "train/en/a.jsonl"], ["train/de", "train/en"], "train/de", ["train/de/a.jsonl"]),
        ],
    )
    def test_no_two_folders_are_read_as_one_unasked(self, files, listed, subset, chosen):
        with raises_fault("SF-DATA-HUB", "org/x", remedy=listed):
            choose_files("org/x", files, "", None, "train")
        assert choose_files("org/x", files, "", subset, "train").files == tuple(chosen)

    def test_twin_without_the_root_as_a_subset_both_would_be_read(self, monkeypatch):
        monkeypatch.setattr(hub_files, "_subset_of", lambda path: "other")
        assert len(choose_files("org/x", ["train.jsonl", "other/train.jsonl"], "", None, "train").files) == 2

    def test_prose_is_no_data(self):
        assert choose_files("org/x", ["a.txt", "LICENSE.txt", "README.txt"], "", None, "train").files == ("a.txt",)
        assert not hub_files.is_data("docs/COPYING.txt")
        assert hub_files.is_data("license_plates.txt")
        assert hub_files.is_data("readme.jsonl")

    def test_several_subsets_without_a_default_are_a_question(self):
        readme = CONFIGS.replace("  default: true\n", "")
        with raises_fault("SF-DATA-HUB", "org/x", remedy=["main", "lines"]):
            choose_files("org/x", ["main/train-0.parquet"], readme, None, "train")

    def test_a_folder_of_an_entry(self):
        files = ["en/train.jsonl", "de/train.jsonl"]
        assert choose_files("org/x", files, CONFIGS, None, "train", "de").files == ("de/train.jsonl",)
