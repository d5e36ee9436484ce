"""Every fault of a data file is named with its line; what is not a fault is read as it stands."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.faults import gives, raises_fault
from surefoot.data.sources import records as rows
from surefoot.data.sources import text
from surefoot.data.sources.records import Row, Source, open_file, parse_bytes, parse_rows
from surefoot.system.errors import Fault, InputError

GOOD = [{"instruction": f"q{number}", "output": f"ä{number}\u2028"} for number in range(4)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in GOOD)
LIST = json.dumps(GOOD, ensure_ascii=False, indent=2)


def parse(data: str | bytes, name: str = "d.jsonl", **wishes) -> list[Row]:
    content, kind = data.encode() if isinstance(data, str) else data, Path(name.removesuffix(".gz")).suffix
    return parse_rows(Source(name, kind, "", lambda: parse_bytes(name, kind, content), **wishes))


def fault_of(data: str | bytes, name: str = "d.jsonl") -> Fault:
    with pytest.raises(InputError) as caught:
        parse(data, name)
    (fault,) = caught.value.faults
    return fault


def test_lines_and_lists_give_the_same_rows_with_their_lines():
    lines, listed = parse(LINES), parse(LIST, "d.json")
    assert [row.value for row in lines] == [row.value for row in listed] == GOOD
    assert [(row.number, row.line) for row in lines] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [(row.number, row.line) for row in listed] == [(1, 2), (2, 6), (3, 10), (4, 14)]


@pytest.mark.parametrize(("name", "text"), [("d.jsonl", LINES), ("d.json", LIST)])
def test_bom_crlf_and_blank_lines_change_nothing(name, text):
    plain = parse(text, name)
    assert parse("\ufeff" + text.replace("\n", "\r\n"), name) == plain
    assert [row.value for row in parse("\n\n" + text + "\n  \n", name)] == GOOD
    assert parse("\n\n" + text, name)[0].line == plain[0].line + 2


def test_open_file_hashes_what_it_read(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(LINES.encode())
    source = open_file(tmp_path / "d.jsonl")
    assert source.sha256 == hashlib.sha256(LINES.encode()).hexdigest()
    assert len(parse_rows(source)) == 4


def test_missing_folder_and_suffix(tmp_path):
    (tmp_path / "d.json").mkdir()
    for name, code in (("no.json", "FILE-MISSING"), ("d.json", "DATA-FILE"), ("d.doc", "DATA-FILE")):
        with raises_fault(f"SF-{code}", tmp_path / name):
            open_file(tmp_path / name)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_malformed_line_is_named_with_its_column(number):
    lines = LINES.split("\n")
    lines[number - 1] = lines[number - 1].replace('"output":', '"output"')
    with raises_fault("SF-DATA-ROW", f"d.jsonl:{number}:32", "JSON"):
        parse("\n".join(lines))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_malformed_record_of_a_list_is_named_with_its_line(number):
    lines = LIST.split("\n")
    lines[4 * number - 1] = lines[4 * number - 1].replace('"output":', '"output"')
    with raises_fault("SF-DATA-ROW", f"d.json:{4 * number}:14", "JSON"):
        parse("\n".join(lines), "d.json")


def test_last_line_cut_at_every_byte():
    data = LINES.encode()
    start = data.rindex(b"{")
    for end in range(start + 1, len(data) - 1):
        fault = fault_of(data[:end])
        assert (fault.where.split(":")[:2], gives(fault.fix, "truncated")) == (["d.jsonl", "4"], True), (end, fault)
    assert parse(data[:-1]) == parse(data)


def test_list_cut_at_every_byte():
    data = LIST.encode()
    for end in range(1, len(data) - 1):
        assert gives(fault_of(data[:end], "d.json").fix, "truncated"), data[:end]


@pytest.mark.parametrize(
    ("data", "name", "where", "code", "said"),
    [
        ("", "d.jsonl", "d.jsonl", "SF-DATA-EMPTY", ()),
        ("\n \r\n\n", "d.jsonl", "d.jsonl", "SF-DATA-EMPTY", ()),
        ("  \n", "d.json", "d.json", "SF-DATA-EMPTY", ()),
        ("[]", "d.json", "d.json", "SF-DATA-EMPTY", ()),
        (LINES.encode().replace(b"\xa42", b"\xa42\xe9"), "d.jsonl", "d.jsonl:3", "SF-DATA-FILE", ("0xe9",)),
        (LINES.encode("latin-1", "replace"), "d.jsonl", "d.jsonl:1", "SF-DATA-FILE", ("0xe4", 33)),
        (LINES.encode("utf-16"), "d.jsonl", "d.jsonl:1", "SF-DATA-FILE", ("UTF-16",)),
        ('{"a": 1, "b": 2, "a": 3}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ("a",)),
        ('{}\n{"a": {"b": 1, "b": 1}}', "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", ("b",)),
        ('[\n{},\n{"a": 1,\n"a": 3}]', "d.json", "d.json:3", "SF-DATA-ROW", ("a",)),
        ('{"a": NaN}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ("NaN",)),
        ('{"a": -Infinity}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ("Infinity",)),
        ('{"a": 1e999}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ("1e999",)),
        ('{"a": ' + "9" * 5000 + "}", "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ()),
        ('{}\n{"a": ' + "[" * 100_000, "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", ()),
        ("{}\n" + "[" * 100_000, "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", ()),
        ('{"a": "x\\ud800"}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ()),
        ('{}\n{"a": ["\\u0000"]}', "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", ("NUL",)),
        ('{"\\udc00": 1}', "d.jsonl", "d.jsonl:1", "SF-DATA-ROW", ()),
        ('{"a": "x\0"}', "d.jsonl", "d.jsonl:1:9", "SF-DATA-ROW", ()),
        ('{"a": 1}', "d.json", "d.json:1:1", "SF-DATA-ROW", ()),
        ('"text"', "d.json", "d.json:1:1", "SF-DATA-ROW", ()),
        ('[{},\n"text"]', "d.json", "d.json:2", "SF-DATA-ROW", (2,)),
        ("{}\n[{}]", "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", (2,)),
        ("{}\nnull\n", "d.jsonl", "d.jsonl:2", "SF-DATA-ROW", (2, "null")),
        ("{} {}\n", "d.jsonl", "d.jsonl:1:4", "SF-DATA-ROW", ()),
        ("[{}] []", "d.json", "d.json:1:6", "SF-DATA-ROW", ()),
        ("[{} {}]", "d.json", "d.json:1:5", "SF-DATA-ROW", ()),
        ("[{},]", "d.json", "d.json:1:5", "SF-DATA-ROW", ()),
        ("garbage\n{}\n", "d.jsonl", "d.jsonl:1:1", "SF-DATA-ROW", ("garbage",)),
        ("{}\ngarbage", "d.jsonl", "d.jsonl:2:1", "SF-DATA-ROW", ("garbage",)),
    ],
)  # fmt: skip
def test_faults_in_one_line(data, name, where, code, said):
    with raises_fault(code, where, *said):
        parse(data, name)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\\n abu01-eNI\ufeff', max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(data):
    for name in ("d.json", "d.jsonl"):
        with suppress(InputError):
            assert parse(data, name)[0].number == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), json_values, max_size=3), min_size=1, max_size=4), st.booleans()
)
def test_every_well_formed_record_is_read(records, ascii_only):
    text = "\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    assert [row.value for row in parse(text)] == records
    text = json.dumps(records, ensure_ascii=ascii_only, indent=1)
    parsed = parse(text, "d.json")
    assert [row.value for row in parsed] == records
    assert [text.split("\n")[row.line - 1][:2] for row in parsed] == [" {"] * len(records)


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_with_the_plain_parser_accepts_what_is_refused(monkeypatch):
    monkeypatch.setattr(text, "_DECODER", json.JSONDecoder())
    assert parse('{"a": 1, "a": 3}')[0].value == {"a": 3}
    assert parse('{"a": 1e999}')[0].value == {"a": float("inf")}


def test_twin_without_the_character_check_lets_half_characters_through(monkeypatch):
    monkeypatch.setattr(rows, "_check_characters", lambda value, where: None)
    assert parse('{"a": "\\ud800"}')[0].value == {"a": "\ud800"}
