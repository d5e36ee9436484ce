"""Bad training data."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

from faults.place import JUDGED, PAIRS, PROMPTS, ROWS, Case, Place, Prepare, Words, refused

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
    *refused(
        {
            "SF-DATA-ROW": {
                "train.jsonl:1:16": {"malformed line 1": data(GOOD.replace('": "', '" "', 1))},
                "train.jsonl:7:23": {"malformed line 7": data(GOOD.replace('"Say heron', '"Say "heron', 1))},
                "train.json:2:6": {
                    "malformed record in a list": data('[{"instruction": "a", "output": "b"},\n{"a" 1}]', "train.json")
                },
                "train.jsonl:1:2": {
                    "single quotes": data(str(ROWS[0])),
                    "UTF-16 without a mark": data(GOOD.encode("utf-16-le")),
                },
                "train.json:1:889": {"comma after the last record": data(json.dumps(ROWS)[:-1] + ",]", "train.json")},
                "train.json:1:1": {"one object, not a list": data(json.dumps(ROWS[0]), "train.json")},
                "train.jsonl:13": {
                    "a record that is a number": data(GOOD + "7\n"),
                    "NaN": data(GOOD + '{"instruction": "a", "output": "b", "score": NaN}\n'),
                    "a number beyond all": data(GOOD + '{"instruction": "a", "output": "b", "score": 1e999}\n'),
                },
                "train.csv:2": {"CSV with an open quote": data('instruction,output\na,"b\n', "train.csv")},
                "train.jsonl:12:68": {"last line cut": data(GOOD[:-10])},
                "train.json:1:859": {"list cut": data(json.dumps(ROWS)[:-30], "train.json")},
                "train.jsonl:5": {
                    "missing field in row 5": rows(lambda own: own[4].pop("output")),
                    "null in row 5": row5(output=None),
                    "a number for an answer": row5(output=4),
                    "a list for an answer": row5(output=["a"]),
                    "true for a question": row5(instruction=True),
                    "empty answer": row5(output=""),
                    "blank answer": row5(output="  \n"),
                    "half of a character": row5(output="\ud800"),
                    "NUL in a text": row5(output="a\0b"),
                },
                "train.jsonl:7:25": {"NUL as it is": data(GOOD.replace("heron", "her\0n"))},
                "train.jsonl:1": {
                    "5 MB on one line that is no record": data("[" * 5_000_000),
                    "a key twice": data('{"instruction": "a", "output": "b", "output": "c"}'),
                    "nested a hundred thousand deep": data('{"a": ' + "[" * 100_000),
                    "a number of 5000 digits": data('{"a": ' + "9" * 5000 + "}"),
                },
                "train.jsonl:1:5000013": {"5 MB of one unclosed text": data('{"output": "' + "a" * 5_000_000)},
                "train.jsonl:2": {
                    "a score for a label": staged("kto", [JUDGED[0], {**JUDGED[1], "label": 0.5}]),
                    "a word for a label": staged("kto", [JUDGED[0], {**JUDGED[1], "label": "good"}]),
                    "no rejected answer": staged("dpo", [PAIRS[0], {"prompt": "a", "chosen": "b"}]),
                    "the answer first": turns("assistant", "user"),
                    "two questions in a row": turns("user", "user", "assistant"),
                    "a question at the end": turns("user", "assistant", "user"),
                    "a system text in the middle": turns("user", "system", "assistant"),
                    "an unknown role": turns("user", "robot"),
                    "no turn": turns(),
                },
            },
            "SF-DATA-FILE": {
                "train.csv:3": {"CSV with a cell too many": data("instruction,output\na,b\nc,d,e\n", "train.csv")},
                "train.csv:1": {"CSV with a column twice": data("instruction,output,output\na,b,c\n", "train.csv")},
                "train.parquet": {"Parquet that is none": data(b"PAR1" + b"x" * 50, "train.parquet")},
                "train.jsonl.gz": {
                    "packed file cut": data(gzip.compress(GOOD.encode())[:-9], "train.jsonl.gz"),
                    "a packed file that unpacks without end": gzip_bomb,
                    "no packed file at all": data("plain", "train.jsonl.gz"),
                },
                "train.jsonl:13": {"cut inside a character": data(GOOD.encode() + '{"a": "ä'.encode()[:-1])},
                "train.jsonl:7": {"data in Latin-1": data(GOOD.replace("heron", "hér").encode("latin-1"))},
                "train.jsonl:1": {
                    "UTF-16": data(GOOD.encode("utf-16")),
                    "an archive under a good name": data(archive()),
                },
            },
            "SF-DATA-EMPTY": {
                "train.jsonl": {"empty file": data(""), "blank lines": data("\n \n\r\n")},
                "train.json": {"empty list": data("[]", "train.json")},
                "train.csv": {"CSV header alone": data("instruction,output\n", "train.csv")},
            },
            "SF-DATA-FORMAT": {
                "train.jsonl:1": {
                    "renamed column": rows(lambda own: [row.update(answer=row.pop("output")) for row in own]),
                    "no layout at all": data('{"x": 1}\n'),
                    "plain answers for DPO": staged("dpo", ROWS),
                    "pairs for SFT": staged("sft", PAIRS),
                    "plain answers for KTO": staged("kto", PROMPTS),
                    "a text for pretraining in another layout": staged("pretrain", ROWS),
                    "a prompt file for SFT": staged("sft", PROMPTS),
                },
                "train.json": {"named column that is not there": column},
            },
            "SF-DATA-LENGTH": {
                "run.yaml:8:15: data.max_length": {"no label left anywhere": settings(max_length=8)},
            },
            "SF-DATA-DESCRIPTION": {
                "sets/dataset_info.json entry 'mine'": {
                    "a name that goes up": described({"file_name": "../secret.json"}),
                    "an absolute name": described({"file_name": "/etc/passwd"}),
                    "a drive": described({"file_name": "C:\\a.json"}),
                    "a link that leaves": described({"file_name": "inside.json"}, link=True),
                    "a described script": described({"script_url": "org/x"}),
                },
            },
            "SF-FILE-MISSING": {
                "run.yaml:7:10: data.train.path": {
                    "an archive": data(archive(), "train.zip"),
                    "a loading script": script,
                    "a missing file": settings(train="trian.json"),
                    "an unknown suffix": data("x", "train.doc"),
                },
            },
            "SF-DATA-SHARES": {
                "run.yaml:9:9: data.eval": {
                    "more held out than there is": settings(eval=1000),
                    "everything held out": settings(eval=12),
                },
            },
            "SF-CONFIG-VALUE": {
                "run.yaml:9:9: data.eval": {"a share above 1": settings(eval=1.5)},
            },
        }
    ),
    Case(
        "BOM and CRLF are read",
        dry(data(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())),
        exit=0,
        shows=("12 records",),
    ),
    Case("a record far too long is cut and counted", dry(row5(output=LONG)), exit=0, shows=("1 of 12",)),
    Case("copies are counted", dry(rows(lambda own: own.extend(own[:6]))), exit=0, shows=("6 ",)),
    Case("overlap with evaluation is counted", dry(evaluated(ROWS[:3])), exit=0, shows=("3 ",)),
    Case(
        "chosen is rejected, everywhere",
        dry(staged("dpo", [{**row, "rejected": row["chosen"]} for row in PAIRS])),
        exit=0,
        shows=("equal answers",),
    ),
    Case("the text of a control token is text", dry(row5(output="a <|eot_id|> b")), exit=0, shows=("12 records",)),
    Case("Jinja in a text is text", dry(row5(output="{{ 7 * 7 }}{% for %}")), exit=0, shows=("12 records",)),
]
