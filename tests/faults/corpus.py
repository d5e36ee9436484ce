"""Real files of every kind that surefoot reads, changed at random for each reader: see mutate.py.

They come from tests, recipes, embedded scripts and the documented commands of other tools, and from the shared data
sets and documents where these lie beside the checkout.
"""

import functools
import gzip
import json
import shlex
from pathlib import Path
from random import Random
from typing import Any

import yaml

from faults.good_files import (
    ADAPTER,
    CARD,
    CELLS,
    CONFIG,
    DEEPSPEED,
    HEADER,
    INDEX,
    JOURNAL,
    LOGGED,
    MANIFEST,
    OWN,
    RECORDS,
    RUN_STATE,
    RUN_YAML,
    TOKENIZER,
    parquet,
)  # fmt: skip
from faults.mutate import mutated, mutated_text, mutated_tree, mutated_words
from faults.parser_inputs import JINJA, OVERRIDE_WORDS, PIECES, SCRIPTS, WORDS
from faults.readers import ADAPTER_WEIGHTS, with_header
from helpers import zoo_templates
from helpers.architectures import TINY
from helpers.plans import adapter_plan, run_plan
from helpers.run_folders import audit, log_rows
from interop.compat.seeds import of_kind
from interop.documented import COMMANDS, FILES
from surefoot.planning.plan import plan_to_json
from surefoot.system.durable import json_text
from surefoot.training.manifest import sealed

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
SCRIPTS_FOLDER = ROOT / "src" / "surefoot" / "interop" / "compat" / "scripts"
BASE = ROOT / "src" / "surefoot" / "commands" / "quickstart" / "base"
_MOST = 4_000  # bytes of a real file that is taken: what takes a millisecond to read is tried a million times
_CUT = 400  # letters of each text in real records, for the same reason
_OVERRIDES = [word.encode() for word in OVERRIDE_WORDS]
_JINJA = [piece.encode() for piece in JINJA]
_PYTHON = [piece.encode() for piece in ("(", ")", "**", "*", "lambda: ", "\\x00", "=", "[", "]", ":", "f'{a}'", "...")]
_FLAGS = [word.encode() for word in WORDS if "\ud800" not in word]


def _read(folder: Path, pattern: str) -> list[bytes]:
    files = sorted(path for path in folder.rglob(pattern) if path.stat().st_size <= _MOST)
    return [path.read_bytes() for path in files]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json_or_text(draw: Random, trees: list[Any]) -> bytes:
    """Half of them are JSON still, with other values; of the others the letters were changed."""
    if draw.random() < 0.5:
        return _json(mutated_tree(draw, draw.choice(trees)))
    return mutated(draw, [_json(tree) for tree in trees], PIECES)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_shortened(held) for held in value[:4]]
    return value[:_CUT] if isinstance(value, str) else value


@functools.cache
def _records() -> list[Any]:
    """Of every layout; with some of each shared data set."""
    found = list(RECORDS)
    for name in ("records.json", "dialogues.json"):
        found += json.loads((ROOT / "tests" / "equality" / name).read_text())[:3]
    for path in sorted(SHARED.rglob("*.json")):
        rows = json.loads(path.read_text())
        found += rows[:3] if isinstance(rows, list) else [rows]
    return [_shortened(one) for one in found]


@functools.cache
def _yaml() -> list[bytes]:
    return [RUN_YAML] * 12 + _read(ROOT / "recipes", "*.yaml")


@functools.cache
def _trees() -> list[Any]:
    return [yaml.safe_load(text) for text in {*_yaml()}]


def config_text(draw: Random) -> tuple[bytes, str]:
    override = ""
    if draw.random() < 0.3:
        return _json(mutated_tree(draw, draw.choice(_trees()))), override  # JSON is YAML
    if draw.random() < 0.3:
        override = mutated_text(draw, _OVERRIDES, [b".", b"[", b"]", b"=", b"0", b"auto", b"{", "²".encode(), b"\x00"])
    return mutated(draw, _yaml(), PIECES), override


def config_values(draw: Random) -> Any:
    tree = mutated_tree(draw, draw.choice(_trees()))
    return tree if isinstance(tree, dict) else {"data": tree}


def data(draw: Random) -> tuple[str, bytes]:
    kind = draw.randrange(6)
    if kind == 0:
        return "d.json", _json_or_text(draw, [draw.choices(_records(), k=2)])
    if kind in (1, 2):
        return "d.jsonl", _json_or_text(draw, [draw.choice(_records())]) + b"\n" + _json(draw.choice(_records()))
    if kind == 3:
        return draw.choice(("d.csv", "d.tsv", "d.txt")), mutated(draw, _cells(), PIECES)
    if kind == 4:
        return "d.parquet", mutated(draw, [parquet()], PIECES)
    text = mutated(draw, [_json(record) + b"\n" for record in _records()[:4]], PIECES)
    packed = gzip.compress(text, mtime=0)
    return "d.jsonl.gz", packed if draw.random() < 0.5 else mutated(draw, [packed], PIECES)


@functools.cache
def _cells() -> list[bytes]:
    return [CELLS, CELLS.replace(b",", b"\t"), b"text\n" + b'"a\nb"\n' * 3, b"a paragraph\n\nanother\n"]


def card(draw: Random) -> tuple[str, str]:
    subset = draw.choice(("", "", "", "en", "default", ".", "a"))
    if draw.random() < 0.5:
        return mutated_text(draw, CARD, PIECES), subset
    header = mutated_tree(draw, draw.choice(_headers()))
    return f"---\n{json.dumps(header)}\n---\n", subset  # JSON is YAML


@functools.cache
def _headers() -> list[Any]:
    return [yaml.safe_load(text.split(b"---\n")[1]) for text in CARD if text.startswith(b"---")]


@functools.cache
def _templates() -> list[bytes]:
    texts = [getattr(zoo_templates, name) for name in dir(zoo_templates) if name.isupper()]
    texts = [text for text in texts if isinstance(text, str) and len(text) <= _MOST]
    return [text.encode() for text in (*texts, (BASE / "chat_template.jinja").read_text())]


def template(draw: Random) -> str:
    if draw.random() < 0.5:
        return "".join(draw.choices(JINJA, k=draw.randint(1, 20)))
    return mutated_text(draw, _templates(), _JINJA)


def weights_header(draw: Random) -> bytes:
    many = {f"layers.{number}": {**HEADER["a"], "data_offsets": [8 * number, 8 * number + 8]} for number in range(4)}
    if draw.random() < 0.7:
        return with_header(_json_or_text(draw, [HEADER, many]), draw.choice((8, 8, 32, 0, 7)))
    return mutated(draw, [with_header(_json(HEADER)), with_header(_json(many), 32), ADAPTER_WEIGHTS], PIECES)


@functools.cache
def _model_configs() -> list[Any]:
    return [CONFIG, *TINY.values(), json.loads((BASE / "config.json").read_text())]


def model_file(draw: Random) -> tuple[str, bytes]:
    if draw.random() < 0.7:
        return "config.json", _json_or_text(draw, _model_configs())
    return draw.choice(list(INDEX)), _json_or_text(draw, list(INDEX.values()))


@functools.cache
def _tokenizers() -> list[Any]:
    real = json.loads((BASE / "tokenizer.json").read_text())
    real["model"]["vocab"] = dict(list(real["model"]["vocab"].items())[:9])
    real["model"]["merges"] = real["model"].get("merges", [])[:4]
    return [TOKENIZER, TOKENIZER, real, json.loads((BASE / "tokenizer_config.json").read_text())]


def tokenizer(draw: Random) -> bytes:
    return _json_or_text(draw, _tokenizers())


def adapter(draw: Random) -> bytes:
    return _json_or_text(draw, [ADAPTER])


def manifest(draw: Random) -> bytes:
    """Some as if they had been written so: the hash of themselves is right."""
    if draw.random() < 0.5:
        return _json_or_text(draw, [MANIFEST, sealed({**MANIFEST, "schema": 2})])
    tree = mutated_tree(draw, {**MANIFEST, "schema": 2})
    return _sealed(tree)


def run_state(draw: Random) -> bytes:
    return _json_or_text(draw, [RUN_STATE])


@functools.cache
def _plans() -> list[Any]:
    plan = run_plan(trainable=10, parameters=100, adapter=adapter_plan(["q_proj"]))
    return [{"plan": plan_to_json(plan), "verified": {}}]


def plan(draw: Random) -> bytes:
    return _json_or_text(draw, _plans())


@functools.cache
def _logs() -> list[bytes]:
    rows = [*log_rows(3, bad=(2,), evaluate=2), audit()]
    return [LOGGED, b"".join(_json(row) + b"\n" for row in rows[:-1]), _json(rows[-1]) + b"\n"]


def log(draw: Random) -> bytes:
    return mutated(draw, _logs(), PIECES)


def own_record(draw: Random) -> bytes:
    if draw.random() < 0.3:
        return _sealed(mutated_tree(draw, draw.choice(OWN)))
    if draw.random() < 0.3:
        head, *lines = JOURNAL
        return b"\n".join([_json(head), *(_json(mutated_tree(draw, line)) for line in lines)])
    return _json_or_text(draw, OWN)


def _sealed(tree: Any) -> bytes:
    """As a manifest is written."""
    try:
        return json_text(sealed(tree)).encode() if isinstance(tree, dict) else _json(tree)
    except (TypeError, ValueError):  # a number that JSON has none for
        return _json(tree)


@functools.cache
def _tool_files() -> dict[str, list[bytes]]:
    """By the ending of their names."""
    texts = {name: text.encode() for name, text in FILES.items()}
    real = [*_read(ROOT / "tests" / "equality", "*.yaml"), *_read(SCRIPTS_FOLDER, "*.yaml")]
    described = _read(ROOT / "tests" / "equality", "dataset_info.json") + _read(SHARED, "dataset_info.json")
    written = [text for name, text in texts.items() if name.endswith((".yml", ".yaml"))]
    return {"a.yaml": [*written, *real], "a.json": [*described, *(_json(yaml.safe_load(text)) for text in real)]}


def tool_file(draw: Random) -> tuple[str, bytes]:
    name = draw.choice(("a.yaml", "a.yaml", "a.yml", "a.json", "sft_config.yaml"))
    if draw.random() < 0.5:
        return name, _json(mutated_tree(draw, draw.choice(_tool_trees())))
    return name, mutated(draw, _tool_files()["a.json" if name.endswith("json") else "a.yaml"], PIECES)


@functools.cache
def _tool_trees() -> list[Any]:
    return [yaml.safe_load(text) for files in _tool_files().values() for text in files]


@functools.cache
def _commands() -> list[list[str]]:
    """The documented ones, and those of the documents that surefoot grew from, without their shells' own words."""
    lines = list(COMMANDS.values())
    for block in of_kind("command", "000", "001"):
        lines += block.text.replace("\\\n", " ").splitlines()
    for text in _read(SCRIPTS_FOLDER, "*.sh"):
        lines += text.decode().replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if len(words) > 1:
            found.append(words)
    return found


def command(draw: Random) -> tuple[list[str], str]:
    """With files beside it: of data, of settings, of a tokenizer."""
    words = mutated_words(draw, _commands(), WORDS) if draw.random() < 0.8 else list(draw.choice(_commands()))
    trees = [_records()[:3], draw.choice(_records()), TOKENIZER, DEEPSPEED, draw.choice(_tool_trees())]
    return words, _json_or_text(draw, trees).decode("utf-8", "replace") if draw.random() < 0.6 else ""


@functools.cache
def _scripts() -> list[bytes]:
    real = _read(SCRIPTS_FOLDER, "*.py") + _read(ROOT / "tests" / "equality" / "scripts", "*.py")
    return [*(text.encode() for text in SCRIPTS), *real]


def script(draw: Random) -> str:
    return mutated_text(draw, _scripts(), _PYTHON)
