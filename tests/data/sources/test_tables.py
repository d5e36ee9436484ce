"""CSV, TSV, Parquet, plain text and gzip: read as they stand, or refused with the line."""

from __future__ import annotations

import builtins
import csv
import datetime
import decimal
import gzip
import io
import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.data.sources import tables as csv_rows
from surefoot.data.sources import tables as parquet_rows
from surefoot.data.sources.records import Source, open_file, parse_bytes, parse_rows
from surefoot.system.errors import InputError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def parse(data, name="d.csv", **wishes):
    content = data.encode() if isinstance(data, str) else data
    kind = "." + name.removesuffix(".gz").rpartition(".")[2]
    return parse_rows(Source(name, kind, "", lambda: parse_bytes(name, kind, content), **wishes))


def values(data, name="d.csv", **wishes):
    return [row.value for row in parse(data, name, **wishes)]


def refuses(code, where, *values, data, name="d.csv"):
    """The content must end with this fault, see `raises_fault`."""
    with raises_fault(code, where, *values):
        parse(data, name)


class TestCsv:
    def test_quotes_line_breaks_and_lines(self):
        rows = parse('text,id\n"a ""b"", c\nd",1\n\ne,2\n')
        assert [(row.number, row.line, row.value) for row in rows] == [
            (1, 2, {"text": 'a "b", c\nd', "id": "1"}),
            (2, 5, {"text": "e", "id": "2"}),
        ]

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_delimiters_from_the_header(self, delimiter):
        assert values(f"text{delimiter}id\na{delimiter}1\n") == [{"text": "a", "id": "1"}]

    def test_the_suffix_tsv_says_tab(self):
        assert values("a,b\tc,d\n1\t2\n", "d.tsv") == [{"a,b": "1", "c,d": "2"}]

    def test_bom_and_crlf_change_nothing(self):
        assert values("\ufefftext,id\r\na,1\r\n") == values("text,id\na,1\n")

    def test_a_cell_longer_than_the_librarys_limit(self):
        assert len(values(f"text\n{'x' * 200_000}\n")[0]["text"]) == 200_000

    def test_twin_the_librarys_limit_would_refuse_it(self, monkeypatch):
        monkeypatch.setattr(csv_rows.sys, "maxsize", 131072)
        refuses("SF-DATA-ROW", "d.csv:2", 131072, data=f"text\n{'x' * 200_000}\n")

    def test_the_limit_is_left_as_it_was(self):
        before = csv.field_size_limit()
        values("text\nx\n")
        assert csv.field_size_limit() == before

    @pytest.mark.parametrize(
        ("text", "code", "where", "said"),
        [
            ("", "SF-DATA-EMPTY", "d.csv", ()),
            ("text,id\n", "SF-DATA-EMPTY", "d.csv", ()),
            ("a,b\n1,2\n3\n", "SF-DATA-FILE", "d.csv:3", (1, 2)),
            ("a,b\n1,2,3\n", "SF-DATA-FILE", "d.csv:2", (3, 2)),
            ("a,,c\n1,2,3\n", "SF-DATA-FILE", "d.csv:1", (2,)),
            ("a,b,a\n1,2,3\n", "SF-DATA-FILE", "d.csv:1", ("'a'",)),
            ('a,b\n1,2\n"3,4\n5,6\n', "SF-DATA-ROW", "d.csv:3", ("CSV", "quote")),
            ('a,b\n"1"x,2\n', "SF-DATA-ROW", "d.csv:2", ("CSV",)),
            ("a\nx\0y\n", "SF-DATA-ROW", "d.csv:2", ("NUL",)),
        ],
    )
    def test_faults_with_their_line(self, text, code, where, said):
        refuses(code, where, *said, data=text)

    def test_lists_are_json_text_in_a_cell(self):
        cell = json.dumps(TURNS).replace('"', '""')
        assert values(f'messages,tools,id\n"{cell}",,[1]\n') == [{"messages": TURNS, "tools": None, "id": "[1]"}]
        assert values(f'chat\n"{cell}"\n', columns={"messages": "chat"}) == [{"messages": TURNS}]

    @pytest.mark.parametrize("name", ["prompt", "chosen", "rejected", "completion"])
    def test_lists_of_messages_in_fields_that_may_be_texts(self, name):
        cell = json.dumps(TURNS)
        quoted = cell.replace('"', '""')
        assert values(f'{name}\n"{quoted}"\n') == [{name: TURNS}]

    @pytest.mark.parametrize("cell", ["[sic] he said", "[1, 2]", "[]", "[note", "plain"])
    def test_twin_texts_in_them_stay_texts(self, cell):
        assert values(f'chosen\n"{cell}"\n') == [{"chosen": cell}]

    def test_a_cell_that_is_no_json_is_named(self):
        refuses("SF-DATA-ROW", "d.csv:2 column 'messages':1:11", "JSON", data='id,messages\n1,"[{""role"": ]"\n')
        refuses("SF-DATA-ROW", "d.csv:2 column 'messages'", "Python", data="messages\n\"[{'role': 'user'}]\"\n")

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
                     min_size=2, max_size=2),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    def test_what_the_standard_writer_writes_is_read_back(self, rows):
        file = io.StringIO(newline="")
        csv.writer(file).writerows([["a", "b"], *rows])
        assert values(file.getvalue().encode()) == [dict(zip("ab", row, strict=True)) for row in rows]

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet='ab,;\t"\r\n', max_size=30))
    def test_any_text_is_read_or_refused(self, text):
        with suppress(InputError):
            assert parse(text)[0].number == 1


class TestParquet:
    def file(self, records, **options) -> bytes:
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the data extra")
        pytest.importorskip("pyarrow.parquet")
        table = records if isinstance(records, pyarrow.Table) else pyarrow.Table.from_pylist(records)
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file, **options)
        return file.getvalue()

    def test_the_same_rows_as_json(self):
        records = [{"messages": TURNS, "n": 1, "ok": True, "x": 0.5, "none": None}] * 3
        data = self.file(records, row_group_size=2)
        rows = parse(data, "d.parquet")
        assert [row.value for row in rows] == records
        assert [(row.number, row.line) for row in rows] == [(1, 1), (2, 2), (3, 3)]

    def test_a_null_inside_a_struct_is_an_absent_field(self):
        records = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"a": 1}]}]}]
        assert values(self.file(records), "d.parquet") == records

    def test_categories_maps_nan_dates_and_decimals(self):
        import pyarrow as pa

        table = pa.table(
            {
                "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
                "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
                "x": pa.array([float("nan"), 1.0, None]),
                "day": pa.array([datetime.date(2024, 1, 2)] * 3),
                "price": pa.array([decimal.Decimal("1.50")] * 3),
            }
        )
        first, second, third = values(self.file(table), "d.parquet")
        assert first == {"kind": "x", "map": {"a": 1}, "x": None, "day": "2024-01-02", "price": "1.50"}
        assert (second["map"], second["x"], third["map"]) == ({}, 1.0, None)

    def test_text_columns_may_hold_json(self):
        assert values(self.file([{"messages": json.dumps(TURNS), "tools": ""}]), "d.parquet") == [
            {"messages": TURNS, "tools": None}
        ]

    @pytest.mark.parametrize(("value", "named"), [(b"png", "bytes"), (float("inf"), "inf")])
    def test_what_json_cannot_hold_is_named_with_its_row(self, value, named):
        data = self.file([{"x": None}, {"x": value}])
        refuses("SF-DATA-ROW", "d.parquet:2", "'x'", named, data=data, name="d.parquet")

    def test_files_that_are_not_whole(self):
        data = self.file([{"text": "x" * 1000}] * 50, compression="none")
        for broken in (data[:-20], b"text\nx\n"):
            refuses("SF-DATA-FILE", "d.parquet", "Parquet", data=broken, name="d.parquet")
        damaged = data[:100] + bytes(200) + data[300:]
        with suppress(InputError):  # no checksums by default: what is damaged may still be readable
            parse(damaged, "d.parquet")

    def test_a_column_twice(self):
        import pyarrow as pa

        table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
        refuses("SF-DATA-FILE", "d.parquet", "'x'", data=self.file(table), name="d.parquet")

    def test_without_pyarrow_the_command_is_told(self, monkeypatch):
        plain = builtins.__import__

        def missing(name, *arguments, **named):
            if name.startswith("pyarrow"):
                raise ImportError(name)
            return plain(name, *arguments, **named)

        data = self.file([{"text": "x"}])
        monkeypatch.setattr(builtins, "__import__", missing)
        with raises_fault("SF-PACKAGE", "d.parquet"):
            parse(data, "d.parquet")

    def test_twin_without_the_null_rule_every_turn_has_every_field(self, monkeypatch):
        monkeypatch.setattr(parquet_rows, "_plain", lambda value: value)
        with pytest.raises(AssertionError):
            self.test_a_null_inside_a_struct_is_an_absent_field()


class TestTextAndGzip:
    def test_a_text_file_is_one_record(self):
        text = "one\n\ntwo\n"
        assert [(row.line, row.value) for row in parse(text, "d.txt")] == [(1, {"text": text})]
        refuses("SF-DATA-EMPTY", "d.txt", data=" \n", name="d.txt")

    @pytest.mark.parametrize(
        ("name", "text"),
        [("d.jsonl", '{"a": 1}\n'), ("d.json", '[{"a": 1}]'), ("d.csv", "a\n1\n"), ("d.tsv", "a\n1\n"), ("d.txt", "a")],
    )
    def test_packed_is_as_unpacked(self, tmp_path, name, text):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        (tmp_path / name).write_text(text)
        packed, plain = open_file(tmp_path / f"{name}.gz"), open_file(tmp_path / name)
        assert parse_rows(packed) == parse_rows(plain)
        assert packed.kind == plain.kind

    @pytest.mark.parametrize("cut", [1, 5, 12, 20, -1])
    def test_a_packed_file_that_is_cut_off(self, cut):
        refuses("SF-DATA-FILE", "d.jsonl.gz", "gzip", data=gzip.compress(b'{"a": 1}\n')[:cut], name="d.jsonl.gz")

    def test_a_packed_file_without_the_suffix_is_told_what_it_is(self):
        packed = gzip.compress(b'{"a": 1}\n')
        refuses("SF-DATA-FILE", "d.jsonl:1", "gzip", data=packed, name="d.jsonl")
        with pytest.raises(AssertionError, match="UTF-8"):  # twin: other bytes that are no text
            refuses("SF-DATA-FILE", "d.jsonl:1", "gzip", data=b"\x1e" + packed[1:], name="d.jsonl")

    @pytest.mark.parametrize("name", ["d.parquet.gz", "d.jsonl.zst", "d.doc", "d.gz", "d"])
    def test_other_suffixes(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"x")
        with raises_fault("SF-DATA-FILE", tmp_path / name):
            open_file(tmp_path / name)


def one_long_text() -> bytes:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["short", "a" * 1001]}), out)
    return out.getvalue()


def test_a_text_that_no_record_is_is_refused_with_its_row(monkeypatch):
    monkeypatch.setattr(parquet_rows, "_LONGEST", 1000)
    with raises_fault("SF-DATA-ROW", "d.parquet:2"):
        list(parse_bytes("d.parquet", ".parquet", one_long_text()))


def test_twin_as_long_as_a_record_may_be_it_is_read(monkeypatch):
    monkeypatch.setattr(parquet_rows, "_LONGEST", 1001)
    assert len(list(parse_bytes("d.parquet", ".parquet", one_long_text()))) == 2
