"""Another tool's settings as they were given: one word each, with the place where it stands.

    read_flags(["--lora_rank", "8", "--bf16"], switches=("bf16",))
    read_pairs(["lora_rank=8"])
    read_document(document)             # a YAML or JSON file

Values are read as YAML 1.2 reads unquoted text, so `5e-4` is a number wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.yaml_reader import Document, Position, parse_value, parse_yaml
from surefoot.config.yaml_scalars import scalar_or_text
from surefoot.interop.faults import setting_error, setting_fault
from surefoot.system.errors import InputError
from surefoot.system.redaction import hides

_KEY = re.compile(r'("(?:[^"\\]|\\.)*+")\s*:')  # of an object in JSON
_FLAG = re.compile(r"--?[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class Word:
    """One setting as it was given.

    name, value: the tool's name of it, and the value as YAML reads it.
    where: "run.yaml:3:1", or the flag.
    shown: as its user wrote it, for messages.
    written: the value's text before it was read; None where that is not known.
    """

    name: str
    value: Any
    where: str
    shown: str
    written: str | None = None


def read_document(document: Document) -> list[Word]:
    """Every top-level key, in the order of the file."""
    words: list[Word] = []
    for name, value in document.data.items():
        position = document.keys.get(name)
        where = document.path if position is None else f"{document.path}:{position.line}:{position.column}"
        words.append(Word(name, value, where, f"{name}: {shown(value)}"))
    return words


def parse_document(text: str, path: str) -> Document:
    """A YAML or JSON file of settings. Raises InputError with every fault."""
    if path.endswith(".json"):
        return _parse_json(text, path)
    document, faults = parse_yaml(text, path)
    if faults:
        raise InputError(faults)
    return document


@lru_cache(maxsize=2)  # each tool is asked in turn whether the file is its own
def top_keys(path: str, text: str) -> frozenset[str]:
    """By which a tool knows its file; none where the file is no YAML or JSON."""
    if not path.lower().endswith((".yaml", ".yml", ".json")):
        return frozenset()
    try:
        return frozenset(parse_document(text, path).data)
    except InputError:
        return frozenset()


def read_pairs(arguments: Sequence[str]) -> list[Word]:
    """`key=value` words, as OmegaConf takes them behind a file. Raises InputError for any other word."""
    words: list[Word] = []
    for text in arguments:
        name, equals, written = text.partition("=")
        if not equals or not name or name.startswith("-"):
            raise setting_error(text, "is not key=value", "overrides behind a file are written like lora_rank=8")
        where = f"{name}=…" if hides(name) else text
        words.append(Word(name, parse_value(written, where) if written else None, where, text, written))
    return words


def read_flags(
    arguments: Sequence[str], *, switches: Collection[str] = (), lists: Collection[str] = ()
) -> tuple[list[Word], list[str]]:
    """`--key value`, `--key=value`, bare `--key` (true) and `--no_key` of a switch; and the words that belong to no
    flag.

    switches: names that may stand without a value. lists: names that take every word up to the next flag; one word
    stays one value. Dashes within a name are underscores. Raises InputError for a flag without its value.
    """
    words: list[Word] = []
    left: list[str] = []
    at = 0
    while at < len(arguments):
        text = arguments[at]
        flag, equals, written = text.partition("=")
        at += 1
        if not _FLAG.fullmatch(flag):
            left.append(text)
            continue
        name = flag.lstrip("-").replace("-", "_")
        values = [written] if equals else []
        room = 0 if equals else len(arguments) if name in lists else 1
        while room and at < len(arguments) and not is_flag(arguments[at]):
            if name in switches and plain_truth(arguments[at]) is None:
                break
            values.append(arguments[at])
            at, room = at + 1, room - 1
        if not values:
            negated = name.removeprefix("no_")
            if name not in switches and negated != name and negated in switches:
                words.append(Word(negated, False, flag, flag))
                continue
            if name in switches or name not in lists:
                words.append(Word(name, True, flag, flag))
                continue
            raise setting_error(flag, "has no value", f"write it like {flag} VALUE")
        read = [read_value(value) for value in values]
        value = read[0] if len(read) == 1 else read
        words.append(Word(name, value, flag, f"{flag} {' '.join(values)}", " ".join(values)))
    return words, left


def read_only_flags(
    arguments: Sequence[str],
    *,
    switches: Collection[str] = (),
    lists: Collection[str] = (),
    fix: str = "write --name value",
) -> list[Word]:
    """`read_flags` for a program that takes nothing else. Raises InputError with each word that belongs to no flag."""
    words, left = read_flags(arguments, switches=switches, lists=lists)
    if left:
        raise InputError([setting_fault(one, "belongs to no flag", fix) for one in left])
    return words


def is_flag(text: str) -> bool:
    """Whether a word of a command begins a flag; -1 and -0.5 are numbers."""
    return _FLAG.fullmatch(text.partition("=")[0]) is not None and text.startswith("-")


def read_value(text: str) -> Any:
    """One value of a command line: a scalar as YAML reads it, a list or a group where one is written out, else text."""
    if text[:1] in ("[", "{"):
        try:
            return parse_value(text, text)
        except InputError:
            return text
    return scalar_or_text(text)


_COUNT = re.compile(r"[0-9]{1,9}")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1", "on"), ("no", "false", "f", "n", "0", "off")


def plain_truth(value: Any) -> bool | None:
    """True or false as transformers' parsers read it; None where it is neither."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def plain_count(value: Any) -> int | None:
    """A whole number from 0 as launchers take it; None for anything else, such as other scripts' digits."""
    return int(text) if _COUNT.fullmatch(text := str(value)) else None


def _parse_json(text: str, path: str) -> Document:
    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for name, value in pairs:
            if name in held:
                raise setting_error(path, f"{name}: duplicate key", "keep one")
            held[name] = value
        return held

    try:
        data = json.loads(text, object_pairs_hook=whole)
    except json.JSONDecodeError as error:
        raise setting_error(f"{path}:{error.lineno}:{error.colno}", f"not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
        raise setting_error(path, f"cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise setting_error(path, "does not hold an object", 'write {"key": value, …}')
    keys = dict(_json_positions(text, data))
    return Document(data, keys, keys, path)


def _json_positions(text: str, names: Collection[str]) -> Iterator[tuple[str, Position]]:
    """Where each key first stands; good enough to find the line by, since settings are flat. In one pass: a file of a
    megabyte may hold a hundred thousand keys."""
    wanted = {json.dumps(name, ensure_ascii=False): name for name in names}
    line, seen, begins = 1, 0, 0  # begins: where the line does
    for found in _KEY.finditer(text):
        name = wanted.pop(found[1], None)
        if name is not None:
            start = found.start()
            line += text.count("\n", seen, start)
            begins = text.rfind("\n", seen, start) + 1 or begins
            seen = start
            yield name, Position(line, start - begins + 1)
