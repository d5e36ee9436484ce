"""Bad training data: faults D1 to D28 of the catalogue."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

from faults.case import Case, Words
from faults.place import JUDGED, PAIRS, PROMPTS, ROWS, Place

Prepare = Callable[[Place], Words | None]
GOOD = "".join(json.dumps(row) + "\n" for row in ROWS)
DIALOGUE = [{"role": "user", "content": "Say sky."}, {"role": "assistant", "content": "sky"}]


def data(content: str | bytes, name: str = "train.jsonl", **keys: Any) -> Prepare:
    """Training data with this content. keys: of the group data."""

    def prepare(place: Place) -> None:
        place.change(data={"train": str(place.text(name, content)), **keys})

    return prepare


def rows(change: Callable[[list[dict[str, Any]]], object], **keys: Any) -> Prepare:
    """The good rows, changed in place, as JSON lines."""

    def prepare(place: Place) -> None:
        own = [dict(row) for row in ROWS]
        change(own)
        place.change(data={"train": str(place.lines("train.jsonl", own)), **keys})

    return prepare


def gzip_bomb(place: Place) -> None:
    data(gzip.compress(b" " * (300 << 20), 1), "train.jsonl.gz")(place)


def row5(**fields: Any) -> Prepare:
    return rows(lambda own: own[4].update(fields))


def staged(stage: str, content: list[dict[str, Any]], **keys: Any) -> Prepare:
    def prepare(place: Place) -> None:
        place.change(stage=stage, data={"train": str(place.lines("train.jsonl", content))}, **keys)

    return prepare


def turns(*roles: str) -> Prepare:
    own = {"messages": [{"role": role, "content": f"text {number}"} for number, role in enumerate(roles)]}
    return data(json.dumps({"messages": DIALOGUE}) + "\n" + json.dumps(own))


def settings(**keys: Any) -> Prepare:
    return lambda place: place.change(data=keys)


def dry(prepare: Prepare) -> Prepare:
    """The same, only planned: what would be trained is told, and nothing is written."""

    def planned(place: Place) -> Words:
        prepare(place)
        return ["train", place.config(), "--dry-run"]

    return planned


def described(entry: dict[str, Any], link: bool = False) -> Prepare:
    def prepare(place: Place) -> None:
        folder = place.text("sets/dataset_info.json", json.dumps({"mine": entry})).parent
        place.lines("secret.json", ROWS)
        if link:
            (folder / "inside.json").symlink_to(place.folder / "secret.json")
        place.change(data={"train": {"path": str(folder), "name": "mine"}})

    return prepare


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("../../escaped.json", "[]")
    return buffer.getvalue()


def script(place: Place) -> None:
    place.text("sets/loader.py", f"open({str(place.folder / 'marker')!r}, 'w')")
    place.change(data={"train": str(place.folder / "sets")})


def evaluated(content: list[dict[str, Any]]) -> Prepare:
    return lambda place: place.change(data={"eval": str(place.lines("eval.json", content))})


def column(place: Place) -> None:
    place.change(data={"train": [{"path": str(place.folder / "train.json"), "columns": {"output": "answr"}}]})


LONG = "word " * 2_000
CASES = [
    Case(
        "D1",
        "malformed line 1",
        data(GOOD.replace('": "', '" "', 1)),
        2,
        ("train.jsonl:1:16", "malformed JSON", "check"),
    ),
    Case(
        "D1",
        "malformed line 7",
        data(GOOD.replace('"Say heron', '"Say "heron', 1)),
        2,
        ("train.jsonl:7:", "malformed JSON", "check quotes"),
    ),
    Case(
        "D1",
        "malformed record in a list",
        data('[{"instruction": "a", "output": "b"},\n{"a" 1}]', "train.json"),
        2,
        ("train.json:2:6", "malformed JSON", "check quotes"),
    ),
    Case("D1", "single quotes", data(str(ROWS[0])), 2, ("train.jsonl:1:2", "malformed JSON")),
    Case("D1", "comma after the last record", data(json.dumps(ROWS)[:-1] + ",]", "train.json"), 2, ("train.json:1:",)),
    Case("D1", "one object, not a list", data(json.dumps(ROWS[0]), "train.json"), 2, ("train.json:1:1", ".jsonl")),
    Case("D1", "a record that is a number", data(GOOD + "7\n"), 2, ("train.jsonl:13", "a number", "not an object")),
    Case(
        "D1",
        "CSV with a cell too many",
        data("instruction,output\na,b\nc,d,e\n", "train.csv"),
        2,
        ("train.csv:3", "3 cells", "the header has 2", "quote cells"),
    ),
    Case(
        "D1",
        "CSV with an open quote",
        data('instruction,output\na,"b\n', "train.csv"),
        2,
        ("train.csv:2", "never closed", "close it"),
    ),
    Case(
        "D1",
        "CSV with a column twice",
        data("instruction,output,output\na,b,c\n", "train.csv"),
        2,
        ("train.csv:1", "'output' twice", "rename"),
    ),
    Case("D1", "Parquet that is none", data(b"PAR1" + b"x" * 50, "train.parquet"), 2, ("train.parquet",)),
    Case("D2", "last line cut", data(GOOD[:-10]), 2, ("train.jsonl:12:", "ends in the middle", "cut off")),
    Case("D2", "list cut", data(json.dumps(ROWS)[:-30], "train.json"), 2, ("train.json:1:", "cut off")),
    Case(
        "D2",
        "packed file cut",
        data(gzip.compress(GOOD.encode())[:-9], "train.jsonl.gz"),
        2,
        ("train.jsonl.gz", "gzip", "cut off"),
    ),
    Case("D2", "cut inside a character", data(GOOD.encode() + '{"a": "ä'.encode()[:-1]), 2, ("train.jsonl:13", "cut")),
    Case("D3", "empty file", data(""), 2, ("train.jsonl", "0 records", "at least one example")),
    Case("D3", "blank lines", data("\n \n\r\n"), 2, ("train.jsonl", "0 records")),
    Case("D3", "empty list", data("[]", "train.json"), 2, ("train.json", "0 records")),
    Case("D3", "CSV header alone", data("instruction,output\n", "train.csv"), 2, ("train.csv", "0 records")),
    Case(
        "D4",
        "renamed column",
        rows(lambda own: [row.update(answer=row.pop("output")) for row in own]),
        2,
        ("train.jsonl:1", "'answer'", "output"),
    ),
    Case("D4", "named column that is not there", column, 2, ("train.json", "'answr'", "output")),
    Case("D4", "no layout at all", data('{"x": 1}\n'), 2, ("train.jsonl:1", "'x'")),
    Case(
        "D5", "missing field in row 5", rows(lambda own: own[4].pop("output")), 2, ("train.jsonl:5", "row 5", "output")
    ),
    Case("D5", "null in row 5", row5(output=None), 2, ("train.jsonl:5", "row 5", "output")),
    Case("D6", "a number for an answer", row5(output=4), 2, ("train.jsonl:5", "row 5", "a number")),
    Case("D6", "a list for an answer", row5(output=["a"]), 2, ("train.jsonl:5", "row 5", "a list")),
    Case("D6", "true for a question", row5(instruction=True), 2, ("train.jsonl:5", "row 5", "true or false")),
    Case("D7", "empty answer", row5(output=""), 2, ("train.jsonl:5", "row 5", "output")),
    Case("D7", "blank answer", row5(output="  \n"), 2, ("train.jsonl:5", "row 5", "output")),
    Case(
        "D8",
        "Latin-1",
        data(GOOD.replace("heron", "hér").encode("latin-1")),
        2,
        ("train.jsonl:7", "byte 0xe9", "UTF-8"),
    ),
    Case("D8", "UTF-16", data(GOOD.encode("utf-16")), 2, ("train.jsonl:1", "UTF-16", "save the file as UTF-8")),
    Case("D8", "UTF-16 without a mark", data(GOOD.encode("utf-16-le")), 2, ("train.jsonl:1",)),
    Case(
        "D9",
        "BOM and CRLF are read",
        dry(data(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())),
        0,
        ("12 records",),
    ),
    Case("D10", "half of a character", row5(output="\ud800"), 2, ("train.jsonl:5", "half of a character", "remove it")),
    Case("D10", "NUL", row5(output="a\0b"), 2, ("train.jsonl:5", "NUL", "remove it")),
    Case("D10", "NUL as it is", data(GOOD.replace("heron", "her\0n")), 2, ("train.jsonl:7:", "control character")),
    Case("D11", "a record far too long is cut and counted", dry(row5(output=LONG)), 0, ("1 of 12",)),
    Case("D12", "5 MB on one line that is no record", data("[" * 5_000_000), 2, ("train.jsonl:1", "nested")),
    Case("D12", "5 MB of one unclosed text", data('{"output": "' + "a" * 5_000_000), 2, ("train.jsonl:1:", "cut off")),
    Case("D13", "no label left anywhere", settings(max_length=8), 2, ("max_length",)),
    Case("D15", "copies are counted", dry(rows(lambda own: own.extend(own[:6]))), 0, ("6 ",)),
    Case("D16", "overlap with evaluation is counted", dry(evaluated(ROWS[:3])), 0, ("3 ",)),
    Case(
        "D17",
        "NaN",
        data(GOOD + '{"instruction": "a", "output": "b", "score": NaN}\n'),
        2,
        ("train.jsonl:13", "NaN", "not JSON"),
    ),
    Case(
        "D17",
        "a number beyond all",
        data(GOOD + '{"instruction": "a", "output": "b", "score": 1e999}\n'),
        2,
        ("train.jsonl:13", "1e999", "too large"),
    ),
    Case(
        "D17",
        "a score for a label",
        staged("kto", [JUDGED[0], {**JUDGED[1], "label": 0.5}]),
        2,
        ("train.jsonl:2", "'label'", "true or false"),
    ),
    Case(
        "D17",
        "a word for a label",
        staged("kto", [JUDGED[0], {**JUDGED[1], "label": "good"}]),
        2,
        ("train.jsonl:2", "'label'", "true or false"),
    ),
    Case(
        "D18",
        "chosen is rejected, everywhere",
        dry(staged("dpo", [{**row, "rejected": row["chosen"]} for row in PAIRS])),
        0,
        ("equal answers",),
    ),
    Case(
        "D18",
        "no rejected answer",
        staged("dpo", [PAIRS[0], {"prompt": "a", "chosen": "b"}]),
        2,
        ("train.jsonl:2", "rejected"),
    ),
    Case("D18", "plain answers for DPO", staged("dpo", ROWS), 2, ("train.jsonl:1", "chosen", "columns")),
    Case(
        "D18", "pairs for SFT", staged("sft", PAIRS), 2, ("train.jsonl:1", "preference", "choose stage reward or dpo")
    ),
    Case("D18", "plain answers for KTO", staged("kto", PROMPTS), 2, ("train.jsonl:1", "label", "columns")),
    Case(
        "D19",
        "a key twice",
        data('{"instruction": "a", "output": "b", "output": "c"}'),
        2,
        ("train.jsonl:1", "'output' twice"),
    ),
    Case("D20", "nested a hundred thousand deep", data('{"a": ' + "[" * 100_000), 2, ("train.jsonl:1", "nested")),
    Case(
        "D20", "a number of 5000 digits", data('{"a": ' + "9" * 5000 + "}"), 2, ("train.jsonl:1", "digits", "as text")
    ),
    Case("D21", "the text of a control token is text", dry(row5(output="a <|eot_id|> b")), 0, ("12 records",)),
    Case("D22", "Jinja in a text is text", dry(row5(output="{{ 7 * 7 }}{% for %}")), 0, ("12 records",)),
    Case("D23", "the answer first", turns("assistant", "user"), 2, ("train.jsonl:2", "turn 1 is assistant")),
    Case("D23", "two questions in a row", turns("user", "user", "assistant"), 2, ("train.jsonl:2", "turn 2 is user")),
    Case("D23", "a question at the end", turns("user", "assistant", "user"), 2, ("train.jsonl:2", "last turn is user")),
    Case("D23", "a system text in the middle", turns("user", "system", "assistant"), 2, ("train.jsonl:2", "turn 2")),
    Case("D23", "an unknown role", turns("user", "robot"), 2, ("train.jsonl:2", "turn 2", "robot")),
    Case("D23", "no turn", turns(), 2, ("train.jsonl:2", "an empty list")),
    Case("D24", "a name that goes up", described({"file_name": "../secret.json"}), 2, ("leaves the folder",)),
    Case("D24", "an absolute name", described({"file_name": "/etc/passwd"}), 2, ("leaves the folder",)),
    Case("D24", "a drive", described({"file_name": "C:\\a.json"}), 2, ("leaves the folder",)),
    Case(
        "D24", "a link that leaves", described({"file_name": "inside.json"}, link=True), 2, ("link out of the folder",)
    ),
    Case("D25", "an archive", data(archive(), "train.zip"), 2, ("train.zip", "ends in .zip", ".jsonl")),
    Case("D25", "an archive under a good name", data(archive()), 2, ("train.jsonl:1",)),
    Case(
        "D25",
        "a packed file that unpacks without end",
        gzip_bomb,
        2,
        ("train.jsonl.gz", "unpack"),
    ),
    Case("D25", "no packed file at all", data("plain", "train.jsonl.gz"), 2, ("train.jsonl.gz", "gzip")),
    Case("D26", "a loading script", script, 2, ("sets",)),
    Case("D26", "a described script", described({"script_url": "org/x"}), 2, ("script_url", "runs no code")),
    Case("D28", "more held out than there is", settings(eval=1000), 2, ("data.eval", "1000", "12")),
    Case("D28", "a share above 1", settings(eval=1.5), 2, ("run.yaml:", "data.eval")),
    Case("D28", "everything held out", settings(eval=12), 2, ("data.eval",)),
    Case("D4", "a missing file", settings(train="trian.json"), 2, ("run.yaml:", "data.train", "does not exist")),
    Case("D4", "an unknown suffix", data("x", "train.doc"), 2, ("run.yaml:", "data.train", ".jsonl")),
    Case("D4", "a text for pretraining in another layout", staged("pretrain", ROWS), 2, ("train.jsonl:1",)),
    Case("D4", "a prompt file for SFT", staged("sft", PROMPTS), 2, ("train.jsonl:1",)),
]
