"""Read another tool's settings from flags, overrides and files: one `Word` per setting, with its place.

    read_flags(["--lora_rank", "8", "--bf16"], switches=("bf16",))
    read_pairs(["lora_rank=8"])
    read_document(document)             # a YAML or JSON file

Values are read as YAML 1.2 reads unquoted text, so `5e-4` is a number in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """One setting as given.

    name, value: the tool's name, and the value as YAML reads it.
    where: place such as "run.yaml:3:1", or the flag.
    shown: the setting as the user wrote it, for messages.
    written: the value's text before parsing; None if not known.
    """

    name: str
    value: Any
    where: str
    shown: str
    written: str | None = None


def read_document(document: Document) -> list[Word]:
    """Return every top-level key, in the order of the file."""
    return [Word(name, value, document.where(name), f"{name}: {shown(value)}") for name, value in document.data.items()]


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read_flat(document: Document, whole: Collection[str] = ()) -> list[Word]:
    """Return every leaf under its dotted name, with OmegaConf's `${output_dir}` resolved. whole: groups that are one
    setting."""
    words: list[Word] = []

    def walk(group: Mapping[str, Any], before: str) -> None:
        for name, value in group.items():
            path = f"{before}{name}"
            if isinstance(value, dict) and value and path not in whole:
                walk(value, f"{path}.")
                continue
            if isinstance(value, str):
                value = _REFERENCE.sub(lambda found: str(_at(document.data, found[1])), value)
            words.append(Word(path, value, document.where(path), f"{path}: {shown(value)}"))

    walk(document.data, "")
    return words


def _at(data: Any, path: str) -> Any:
    for step in path.split("."):
        data = data.get(step) if isinstance(data, dict) else None
    return data


def parse_document(text: str, path: str) -> Document:
    """Parse a YAML or JSON file of settings. Raises InputError with every fault."""
    if path.endswith(".json"):
        return _parse_json(text, path)
    document, faults = parse_yaml(text, path, any_names=True)
    if faults:
        raise InputError(faults)
    return document


@lru_cache(maxsize=2)  # each tool checks in turn whether the file is its own
def top_keys(path: str, text: str) -> frozenset[str]:
    """Return the top-level keys, by which a tool recognizes its file; empty if it is neither YAML nor JSON."""
    if not path.lower().endswith((".yaml", ".yml", ".json")):
        return frozenset()
    try:
        return frozenset(parse_document(text, path).data)
    except InputError:
        return frozenset()


def read_pairs(arguments: Sequence[str]) -> list[Word]:
    """Read `key=value` overrides, as OmegaConf takes them after a file. Raises InputError for anything else."""
    words: list[Word] = []
    for text in arguments:
        name, equals, written = text.partition("=")
        if not equals or not name or name.startswith("-"):
            raise setting_error(text, "is not key=value", "write overrides after a file like lora_rank=8")
        where = f"{name}=…" if hides(name) else text
        words.append(Word(name, parse_value(written, where) if written else None, where, text, written))
    return words


def read_flags(
    arguments: Sequence[str], *, switches: Collection[str] = (), lists: Collection[str] = ()
) -> tuple[list[Word], list[str]]:
    """Read `--key value`, `--key=value`, bare `--key` (true) and `--no_key` of a switch. Returns (settings, rest).

    switches: names that may have no value.
    lists: names that take every word up to the next flag; a single word stays a single value.
    Dashes in names become underscores. Raises InputError for a flag without its value.
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
            raise setting_error(flag, "has no value", f"write {flag} VALUE")
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
    """Read flags of a program that takes nothing else. Raises InputError with each word that belongs to no flag."""
    words, left = read_flags(arguments, switches=switches, lists=lists)
    if left:
        raise InputError([setting_fault(one, "belongs to no flag", fix) for one in left])
    return words


def without_variables(words: Sequence[Word], name: str) -> tuple[list[Word], dict[str, str]]:
    """Return the settings without the one of that name, and the variables that it sets (`env: {NAME: value}`)."""
    held = [word for word in words if word.name == name and word.value]
    for word in held:
        if not isinstance(word.value, dict):
            what = f"{name}: expected names with their values"
            raise setting_error(word.where, what, f"write {name}: {{NAME: value}}")
    found = {str(own): str(value) for word in held for own, value in word.value.items()}
    return [word for word in words if word.name != name], found


def is_flag(text: str) -> bool:
    """Return whether a word of a command is a flag; -1 and -0.5 are numbers."""
    return _FLAG.fullmatch(text.partition("=")[0]) is not None and text.startswith("-")


def read_value(text: str) -> Any:
    """Parse one command-line value: a scalar as in YAML, a list or mapping if written as one, else text."""
    if text[:1] in ("[", "{"):
        try:
            return parse_value(text, text)
        except InputError:
            return text
    return scalar_or_text(text)


_COUNT = re.compile(r"[0-9]{1,9}")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1", "on"), ("no", "false", "f", "n", "0", "off")


def plain_truth(value: Any) -> bool | None:
    """Parse true or false as transformers' parsers do; None if it is neither."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def plain_count(value: Any) -> int | None:
    """Parse a non-negative integer in ASCII digits, as launchers do; None for anything else."""
    return int(text) if _COUNT.fullmatch(text := str(value)) else None


def _parse_json(text: str, path: str) -> Document:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        group: dict[str, Any] = {}
        for name, value in pairs:
            if name in group:
                raise setting_error(path, f"{name}: duplicate key", "keep one")
            group[name] = value
        return group

    try:
        data = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise setting_error(f"{path}:{error.lineno}:{error.colno}", f"not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
        raise setting_error(path, f"cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise setting_error(path, "does not hold an object", 'write {"key": value, …}')
    keys = dict(_json_positions(text, data))
    return Document(data, keys, keys, path)


def _json_positions(text: str, names: Collection[str]) -> Iterator[tuple[str, Position]]:
    """Yield the first position of each key, which is enough to find its line as settings are flat. One pass over the
    text: a file of a megabyte may hold a hundred thousand keys."""
    wanted = {json.dumps(name, ensure_ascii=False): name for name in names}
    line, seen, line_start = 1, 0, 0
    for found in _KEY.finditer(text):
        name = wanted.pop(found[1], None)
        if name is not None:
            start = found.start()
            line += text.count("\n", seen, start)
            line_start = text.rfind("\n", seen, start) + 1 or line_start
            seen = start
            yield name, Position(line, start - line_start + 1)
