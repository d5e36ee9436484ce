"""The cache gives back what was put in, or nothing."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from helpers.faults import raises_fault
from surefoot.data.tokenize import cache
from surefoot.data.tokenize import dataset as dataset_module
from surefoot.data.tokenize.cache import cache_key, open_cache
from surefoot.data.tokenize.dataset import (
    CONTINUED,
    CONTINUES,
    CONTROL_TEXT,
    PROMPT_CUT,
    PROMPT_LOST,
    STOP_LOST,
    TRUNCATED,
    joined,
    of_files,
)
from surefoot.data.tokenize.encode import Encoded
from surefoot.system import disk, durable

RECORD = {"layout": "alpaca", "dropped": [[3, 9]], "rows": 4}


def example(number: int, *ids: int, learned: int = 1, **cut: bool) -> Encoded:
    mask = np.arange(len(ids)) >= len(ids) - learned
    facts = {"truncated": False, "stop_lost": False, "control_texts": 0, "answers_lost": 0, **cut}
    return Encoded(np.array(ids, dtype=np.uint32), mask, number, 10 * number, **facts)


EXAMPLES = [
    example(1, 5, 6, 7),
    example(2, 65_535, 0, learned=2, truncated=True, prompt_cut=True, stop_lost=True, answers_lost=3),
    example(4, *range(1, 9), learned=5, truncated=True, prompt_lost=True, control_texts=3),
]


def write_cache(folder: Path, name: str, examples: list[Encoded], record: dict, vocabulary: int):
    """Each example as a batch of its own."""
    file, known, unkept = cache.write_cache(folder, name, ([one] for one in examples), lambda: record, vocabulary)
    assert unkept == ""
    return file, known


@pytest.fixture
def folder(tmp_path) -> Path:
    write_cache(tmp_path / "cache" / "key", "d.json", EXAMPLES, RECORD, vocabulary=65_536)
    return tmp_path / "cache" / "key"


def test_what_was_written_comes_back(folder):
    found = open_cache(folder, "d.json")
    assert found is not None
    file, record = found
    dataset = of_files([file])
    assert record == RECORD
    assert len(dataset) == 3
    for index, one in enumerate(EXAMPLES):
        read = dataset[index]
        assert read.ids.tolist() == one.ids.tolist()
        assert read.supervised.tolist() == one.supervised.tolist()
        assert (read.number, dataset.row(index)) == (one.number, ("d.json", one.number, one.line))
        assert dataset.length(index) == len(one.ids)
        assert dataset.supervised(index) == one.supervised.sum()
    assert dataset.lengths.tolist() == [3, 2, 8]
    assert dataset.flags().tolist() == [0, TRUNCATED | PROMPT_CUT | STOP_LOST, TRUNCATED | PROMPT_LOST | CONTROL_TEXT]
    assert [dataset.subset([place]).answers_lost() for place in range(3)] == [0, 3, 0]
    assert isinstance(file.ids.base, np.memmap)
    assert not file.ids.flags.writeable


@pytest.mark.parametrize(("vocabulary", "width"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_take_the_least_room(tmp_path, vocabulary, width):
    write_cache(tmp_path / "a", "d.json", EXAMPLES, RECORD, vocabulary)
    found = open_cache(tmp_path / "a", "d.json")
    assert found is not None
    assert found[0].ids.dtype == width


def test_a_subset_is_a_view_in_its_own_order(folder):
    found = open_cache(folder, "d.json")
    assert found is not None
    part = of_files([found[0]]).subset([2, 0]).subset([1])
    assert len(part) == 1
    assert part[0].ids.tolist() == [5, 6, 7]
    assert part.lengths.tolist() == [3]
    assert part.files[0].ids is found[0].ids


def test_every_flipped_byte_and_every_cut_is_seen(folder):
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
            assert open_cache(folder, "d.json") is None, (path.name, place)
        path.write_bytes(whole[:-1])
        assert open_cache(folder, "d.json") is None or path.name == "meta.json"  # its last byte is a line end
        path.unlink()
        assert open_cache(folder, "d.json") is None
        path.write_bytes(whole)
    assert open_cache(folder, "d.json") is not None


def test_a_damaged_cache_is_written_anew(folder):
    (folder / "ids.npy").write_bytes(b"")
    assert open_cache(folder, "d.json") is None
    write_cache(folder, "d.json", EXAMPLES, RECORD, vocabulary=65_536)
    assert open_cache(folder, "d.json") is not None
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_the_key_depends_on_every_part(monkeypatch):
    parts = {"file": "ab", "max_length": 8, "bos": None, "train_on": "last"}
    changed = [{**parts, name: "other"} for name in parts]
    keys = {cache_key(parts), *(cache_key(one) for one in changed)}
    assert cache_key(dict(reversed(parts.items()))) == cache_key(parts)
    monkeypatch.setattr(cache, "code_digest", lambda: "other code")
    assert len({*keys, cache_key(parts)}) == 6


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the sources that count, which a test may change; what it returns computes their digest."""
    for path in cache._sources():
        copy = tmp_path / path.relative_to(cache._PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)
    return tmp_path, cache.code_digest.__wrapped__


@pytest.mark.parametrize("name", [
    "data/tokenize/encode.py", "data/tokenize/truncate.py", "data/chat/jinja_template.py", "data/chat/turn_by_turn.py",
    "data/formats/supervised.py", "families/templates.py",
])  # fmt: skip
def test_other_code_is_another_key(package, name):
    folder, digest = package
    before = digest()
    assert before == cache.code_digest() == digest()
    with open(folder / name, "a") as file:
        file.write("#")
    assert digest() != before


def test_twin_code_that_decides_no_ids_is_not_looked_at(package):
    folder, digest = package
    before = digest()
    (folder / "report").mkdir()
    (folder / "report" / "html.py").write_text("#")
    assert digest() == before


PROCESSES = 4
ROUNDS = 30  # each begins with an absent or a damaged folder; a race shows in a few of them


def open_or_write(parent, start, wrong):
    """What each process does: all at once, round after round. wrong: set by whoever does not get the data."""
    for number in range(ROUNDS):
        start.wait()
        try:
            folder = parent / str(number)
            found = open_cache(folder, "d.json") or write_cache(folder, "d.json", EXAMPLES, RECORD, vocabulary=65_536)
            dataset = of_files([found[0]])
            assert found[1] == RECORD
            assert [dataset[k].ids.tolist() for k in range(3)] == [one.ids.tolist() for one in EXAMPLES]
        except BaseException:
            wrong.set()


def all_processes_get_the_data(parent):
    for number in range(0, ROUNDS, 2):  # a folder that does not verify
        (parent / str(number)).mkdir(parents=True)
        (parent / str(number) / "meta.json").write_text("{}")
    fork = multiprocessing.get_context("fork")
    start, wrong = fork.Barrier(PROCESSES, timeout=30), fork.Event()
    processes = [fork.Process(target=open_or_write, args=(parent, start, wrong)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return not wrong.is_set()


def test_processes_that_start_at_once_share_one_folder(tmp_path):
    assert all_processes_get_the_data(tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(map(str, range(ROUNDS)))
    assert all(open_cache(path, "d.json") for path in (tmp_path / "cache").iterdir())


def test_twin_who_comes_second_would_go_without(tmp_path, monkeypatch):
    """All write at once, and only one can give the folder its name."""
    monkeypatch.setattr(cache, "_is_taken", lambda error: False)
    assert not all_processes_get_the_data(tmp_path / "cache")


def test_another_process_may_write_between_our_look_and_our_rename(folder, monkeypatch):
    monkeypatch.setattr(cache, "_move_away", lambda folder: None)
    looks = iter([None])  # the first look comes too early
    monkeypatch.setattr(cache, "open_cache", lambda folder, name: next(looks, open_cache(folder, "d.json")))
    dataset, record = write_cache(folder, "d.json", EXAMPLES, RECORD, vocabulary=65_536)
    assert (len(dataset), record) == (3, RECORD)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    with raises_fault("SF-DISK-FULL", f"{tmp_path}/key") as caught:
        write_cache(tmp_path / "key", "d.json", EXAMPLES, RECORD, vocabulary=9)
    assert str(tmp_path / "key") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_twin_without_hashes_believes_a_flipped_bit(folder, monkeypatch):
    hashes = {path.name: durable.sha256_file(path) for path in folder.iterdir()}
    monkeypatch.setattr(durable, "sha256_file", lambda path: hashes[path.name])
    data = bytearray((folder / "ids.npy").read_bytes())
    data[-1] ^= 1
    (folder / "ids.npy").write_bytes(bytes(data))
    assert open_cache(folder, "d.json") is not None


def test_meta_is_plain_json(folder):
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    names = ("field_offsets", "fields", "fingerprints", "ids", "mask", "offsets", "rows", "supervised")
    assert sorted(meta["files"]) == sorted(["pictures.json", *(f"{name}.npy" for name in names)])


def test_examples_of_several_files_are_one_data_set(folder):
    """Names, widths and places of the files stay; nothing is copied together."""
    wide, _ = write_cache(folder.with_name("wide"), "b.json", EXAMPLES[:2], RECORD, vocabulary=65_537)
    narrow, _ = write_cache(folder.with_name("narrow"), "a.json", EXAMPLES, RECORD, vocabulary=65_536)
    data = joined([of_files([wide, narrow]).subset([4, 0]), of_files([narrow]).subset([2])])
    assert [data[index].number for index in range(3)] == ["a.json:40", "b.json:10", "a.json:40"]
    assert [data.row(index) for index in range(2)] == [("a.json", 4, 40), ("b.json", 1, 10)]
    assert [data[index].ids.tolist() for index in range(3)] == [[*range(1, 9)], [5, 6, 7], [*range(1, 9)]]
    assert data.lengths.tolist() == [8, 3, 8]
    assert [data.supervised(index) for index in range(3)] == [5, 1, 5]
    assert data.flags().tolist() == [TRUNCATED | PROMPT_LOST | CONTROL_TEXT, 0, TRUNCATED | PROMPT_LOST | CONTROL_TEXT]
    assert data.supervised_counts.tolist() == [5, 1, 5]
    prints = data.fingerprints()
    assert prints[1] == of_files([narrow]).fingerprints()[0]  # the same ids in another width
    assert prints[0] == prints[2] != prints[1]
    assert data.subset([1])[0].number == "b.json:10"
    assert [data.files[place].ids is file.ids for place, file in enumerate((wide, narrow, narrow))] == [True] * 3


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 1, 2, 3], [2, 2, 3, 1], [1]])
def test_many_at_a_time_are_what_each_is_alone(folder, order, most, monkeypatch):
    monkeypatch.setattr(dataset_module, "CHUNK", most)
    wide, _ = write_cache(folder.with_name("wide"), "b.json", EXAMPLES[:2], RECORD, vocabulary=65_537)
    narrow, _ = write_cache(folder.with_name("narrow"), "a.json", EXAMPLES, RECORD, vocabulary=65_536)
    data = of_files([wide, narrow]).subset(order)
    chunks = list(data.chunks())
    alone = [data[index] for index in range(len(order))]
    assert [chunk.start for chunk in chunks] == list(range(0, len(order), most))
    assert np.concatenate([chunk.ids for chunk in chunks]).tolist() == [n for one in alone for n in one.ids.tolist()]
    masks = [one.supervised.tolist() for one in alone]
    assert np.concatenate([chunk.mask for chunk in chunks]).tolist() == [n for mask in masks for n in mask]
    assert data.supervised_counts.tolist() == [sum(mask) for mask in masks]


def test_twin_a_label_more_is_another_fingerprint(folder):
    one = EXAMPLES[2]
    other = one._replace(supervised=~one.supervised)
    files = [
        write_cache(folder.with_name(name), "a.json", [it], RECORD, vocabulary=99)[0]
        for name, it in (("one", one), ("other", other))
    ]
    assert of_files(files[:1]).fingerprints()[0] != of_files(files[1:]).fingerprints()[0]


def test_parts_of_a_text_are_marked(tmp_path):
    parts = [example(1, 5, 6, continued=True), example(1, 6, 7, continues=True)]
    file, _ = write_cache(tmp_path / "key", "d.json", parts, RECORD, vocabulary=9)
    assert of_files([file]).flags().tolist() == [CONTINUED, CONTINUES]


def test_a_file_without_examples_is_empty(tmp_path):
    file, _ = write_cache(tmp_path / "key", "d.json", [], RECORD, vocabulary=9)
    assert len(file) == len(of_files([file])) == 0
