"""A file is read in pieces, wherever their borders fall: what comes of it is what comes of the whole."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiers import representatives
from surefoot.data.formats import Conversation, ToolCall, Turn
from surefoot.data.formats import reader as reading
from surefoot.data.formats.spool import spooled
from surefoot.data.sources import text as text_pieces
from surefoot.data.sources.records import open_file, parse_bytes, read_rows
from surefoot.data.tokenize import cache
from surefoot.data.tokenize.cache import growing
from surefoot.data.tokenize.encode import Encoded
from surefoot.system.errors import InputError

RECORDS = [
    {"instruction": f"q{number} ä\U0001f600\u2028", "output": f'"{number}", [1]\n}}\r {{', "n": number * 1.5}
    for number in range(5)
]
LISTED = json.dumps(RECORDS, ensure_ascii=False, indent=1)
LINES = "\n\r\n".join(json.dumps(record) for record in RECORDS)
TABLE = "\n\ninstruction,output\r\n" + "".join(f'q{n},"a ""{n}"",\r\n\rb"\r\n' for n in range(5))
NUMBERS = "[1.5e1, -20, 3, true, null , NaN]"
PIECES = [1, 2, 3, 7, 64]
GROWTH = 1.5  # of what is held, where the file is four times as long: both hold some pieces and a record


def whole_list(text: str) -> list[tuple[int, Any]]:
    """(line, value) of a list in memory, by the standard library alone."""
    found, at = [], text.index("[") + 1
    while True:
        while text[at] in " \r\n\t,":
            at += 1
        if text[at] == "]":
            return found
        value, end = json.JSONDecoder().raw_decode(text, at)
        found.append((text.count("\n", 0, at) + 1, value))
        at = end


def whole_table(text: str) -> list[dict[str, str]]:
    header, *rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    return [dict(zip(header, row, strict=True)) for row in rows]


def told(name: str, text: bytes) -> str:
    """The one fault of a file."""
    with pytest.raises(InputError) as caught:
        list(parse_bytes(name, Path(name).suffix, text))
    return str(caught.value)


@pytest.mark.parametrize("size", PIECES)
def test_where_pieces_end_makes_no_difference(size, monkeypatch):
    monkeypatch.setattr(text_pieces, "_PIECE", size)
    assert list(parse_bytes("d.json", ".json", LISTED.encode())) == whole_list(LISTED)
    lines = [(2 * number + 1, record) for number, record in enumerate(RECORDS)]
    assert list(parse_bytes("d.jsonl", ".jsonl", LINES.encode())) == lines
    assert list(parse_bytes("d.jsonl.gz", ".jsonl", gzip.compress(LINES.encode()))) == lines
    rows = list(parse_bytes("d.csv", ".csv", TABLE.encode()))
    assert [value for _, value in rows] == whole_table(TABLE)
    assert [line for line, _ in rows] == [4, 7, 10, 13, 16]


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.json", NUMBERS),
        ("d.json", "[{}, 12 34]"),
        ("d.json", "[{},\n {}\n\n {}" + " " * 40 + "]"),
        ("d.json", '[{}, {"a": "' + "x" * 50 + '", "b" 1}, {"c": ' + "[1, " * 30),
        ("d.json", "[{}]\n\n x"),
        ("d.jsonl", '{}\n{"a": tru}\n{}'),
        ("d.jsonl", "{}\n" + "ä" * 40),
        ("d.csv", "a,b\n1,2\n3\n"),
        ("d.csv", 'a,b\n1,"2\n3'),
    ],
)
def test_a_fault_is_told_the_same_wherever_pieces_end(name, text, size, monkeypatch):
    whole = told(name, text.encode())
    monkeypatch.setattr(text_pieces, "_PIECE", size)
    assert told(name, text.encode()) == whole


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("end", [b"\xff{}", b"\xc3", b"{}\xe2\x82"])
def test_bytes_that_are_no_text_have_line_and_offset(end, size, monkeypatch):
    data = '{"a": "ää"}\n{}\n'.encode() + end
    whole = told("d.jsonl", data)
    assert whole.startswith("d.jsonl:3")
    monkeypatch.setattr(text_pieces, "_PIECE", size)
    assert told("d.jsonl", data) == whole


def test_twin_a_number_that_is_believed_at_the_end_of_a_piece_is_another(monkeypatch):
    monkeypatch.setattr(text_pieces, "_PIECE", 4)
    monkeypatch.setattr("surefoot.data.sources.text._OPEN_END", -1)
    assert next(parse_bytes("d.json", ".json", b"[12, 3]")) == (1, 12)
    with pytest.raises(InputError):
        list(parse_bytes("d.json", ".json", b"[1.5e1]"))


def held(rows: Iterator[Any]) -> int:
    """The most bytes that Python held while they were taken one by one."""
    tracemalloc.start()
    try:
        for _ in rows:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", representatives(["d.json", "d.jsonl", "d.csv", "d.jsonl.gz"], "d.json", "d.csv"))
def test_what_is_held_does_not_grow_with_the_file(name, tmp_path):
    def file(count: int) -> Path:
        records = [{"instruction": f"{number}" + "q" * 500, "output": "a"} for number in range(count)]
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        if name == "d.json":
            text = json.dumps(records)
        if name == "d.csv":
            text = "instruction,output\n" + "".join(f"{record['instruction']},a\n" for record in records)
        path = tmp_path / f"{count}{name}"
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    few, many = (held(read_rows(open_file(file(count)))) for count in (3000, 12_000))
    assert many < GROWTH * few
    kept: list[Any] = []
    assert held(map(kept.append, read_rows(open_file(file(12_000))))) > GROWTH * few  # twin: all rows stay


def test_a_file_that_grows_is_the_one_that_numpy_writes(tmp_path):
    rng = np.random.default_rng(0)
    for dtype, row in (
        (np.dtype(np.uint16), ()),
        (np.dtype(np.int64), (4,)),
        (np.dtype("V16"), ()),
        (np.dtype(bool), ()),
    ):
        parts = [
            np.frombuffer(rng.bytes(count * dtype.itemsize * int(np.prod(row))), dtype=dtype).reshape(count, *row)
            for count in (0, 3, 11)
        ]
        with growing(tmp_path / f"{dtype}.npy", dtype, row) as append:
            for part in parts:
                append(part)
        whole = io.BytesIO()
        np.save(whole, np.concatenate(parts), allow_pickle=False)
        assert (tmp_path / f"{dtype}.npy").read_bytes() == whole.getvalue()


def test_batches_of_any_size_are_the_same_bytes(tmp_path):
    rng = np.random.default_rng(1)
    examples = [
        Encoded(
            rng.integers(0, 99, length, dtype=np.uint32), rng.random(length) < 0.5, number, number, good=number % 2 > 0
        )
        for number, length in enumerate([5, 1, 9, 30, 2, 2, 8], start=1)
    ]
    folders = []
    for size in (1, 3, 7):
        folders.append(tmp_path / str(size))
        batches = (examples[at : at + size] for at in range(0, 7, size))
        cache.write_cache(folders[-1], "d", batches, lambda: {"rows": 7}, 99)
    first, *others = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert others == [first, first]
    flat = np.concatenate([one.ids for one in examples]).astype(np.uint16)
    assert np.load(folders[0] / "ids.npy").tolist() == flat.tolist()
    assert np.load(folders[0] / "offsets.npy").tolist() == [0, 5, 6, 15, 45, 47, 49, 57]


def test_batches_hold_so_many_conversations(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH", 4)
    path = tmp_path / "d.jsonl"
    path.write_text("".join(f'{{"instruction": "q{n}", "output": "{{{{name}}}}"}}\n' for n in range(10)))
    found = reading.Reading(open_file(path), "answers", 9)
    assert [len(batch) for batch in found.batches()] == [4, 4, 1]
    assert (found.rows, found.used, found.layout) == (10, 9, "alpaca")
    assert found.placeholders == [(number, number) for number in range(1, 10)]
    assert (found.placeholder, found.example_prompt) == ("{{name}}", "q0")


def _without_pictures(one: dict) -> dict:
    """As conversations were before they could have some: what runs learned from goes on having its digest."""
    del one["images"], one["pictures"], one["record"], one["arguments"]
    for turn in one["turns"]:
        del turn["images"], turn["thought"]
    return one


def test_conversations_come_back_from_the_disk_as_they_were():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [1.5, None, "ä"]}}}
    turns = (
        Turn("user", "q\u2028\r\n", context="c"),
        Turn("assistant", "", calls=(ToolCall("f", {"z": {"y": 1, "b": 2}}, "id"),), learned=False),
        Turn("tool", "r", call="id", tool="f"),
    )
    whole = [[Conversation(turns, 3, 30, (tool,), True), Conversation((Turn("text", "t"),))], [Conversation(turns[:1])]]
    with spooled(iter(whole)) as found:
        listed = [one for batch in whole for one in batch]
        for _ in range(2):
            assert [one for batch in found.again() for one in batch] == listed
        first = next(found.again())[0]
        assert list(first.tools[0]["function"]["parameters"]) == ["z", "a"]  # templates write them in this order
        text = json.dumps([_without_pictures(asdict(one)) for one in listed], sort_keys=True, ensure_ascii=False)
        assert found.digest == hashlib.sha256(text.encode()).hexdigest()
