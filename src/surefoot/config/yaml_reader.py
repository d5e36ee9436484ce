"""Read YAML 1.2 strictly, with the position of every key and value.

    document = read_yaml(Path("run.yaml"))
    document.data["optim"]["lr"], document.values["optim.lr"].line

PyYAML alone follows YAML 1.1: `1e-4` is text, `no` is false, `010` is 8, `12:30:45` is 45045, and of two equal keys
the last wins. Only its scanner and parser are used here; values are built from their events, so an alias is refused
and never expanded. As a consequence, tags, anchors, merge keys and keys with a dot, which configs do not need, are
errors. Input may be untrusted, so size and depth are limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from yaml import events
from yaml.error import Mark, MarkedYAMLError, YAMLError
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.scanner import Scanner

from surefoot.config.yaml_scalars import plain_scalar
from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError

_PROBLEMS = (  # (part of PyYAML's message, what is wrong, what to do)
    ("'\\t' that cannot start any token", "a tab instead of spaces", "indent with spaces"),
    ("that cannot start any token", "text cannot start with this character", "put the text in quotes"),
    (
        "mapping values are not allowed here",
        "unexpected colon",
        "check the indentation here and above, or quote the text",
    ),
    ("expected <block end>", "is not aligned with the keys above", "indent all keys of a group equally"),
    ("could not find expected ':'", "a key without a colon", "write `key: value`"),
    ("expected ',' or ']'", "a list that is not closed", "add ]"),
    ("expected ',' or '}'", "a group that is not closed", "add }"),
    ("unknown escape character", "unknown escape sequence", "use single quotes, or double the backslash"),
)


def explain_syntax(error: Exception, text: str) -> tuple[int, int, str, str]:
    """Return (line, column, what is wrong, what to do); line and column count from 1."""
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        return line, column, f"character U+{error.character:04X} is not allowed", "remove it"
    if not isinstance(error, MarkedYAMLError):
        return 1, 1, "not valid YAML: an escape sequence is not a character", "check the \\x, \\u and \\U escapes"
    mark = error.problem_mark or error.context_mark
    what, fix = f"not valid YAML: {error.problem}", ""
    for pattern, meaning, remedy in _PROBLEMS:
        if pattern in str(error.problem):
            what, fix = f"not valid YAML: {meaning}", remedy
            break
    if "quoted scalar" in str(error.context) and "end of stream" in str(error.problem):
        what, fix = "not valid YAML: a quote that is not closed", "add the closing quote"
    if error.context_mark and ("is not closed" in what):
        mark = error.context_mark  # where it starts
    if mark is None:
        return 1, 1, what, fix
    return mark.line + 1, mark.column + 1, what, fix


MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class Position(NamedTuple):
    """A position in a file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """The content of a YAML file, with positions.

    data: plain dicts, lists and scalars.
    keys, values: dotted path -> position of the key or value ("adapter.targets.0" is the first item of a list).
    path: the file as given.
    """

    data: dict[str, Any]
    keys: dict[str, Position]
    values: dict[str, Position]
    path: str

    def where(self, key: str) -> str:
        """Return the place of a key, such as "run.yaml:3:1"; the file alone for a key that is not in it."""
        at = self.keys.get(key)
        return self.path if at is None else f"{self.path}:{at.line}:{at.column}"


def read_yaml(path: Path) -> Document:
    """Read the mapping in a regular YAML file. Raises InputError with every fault."""
    with _reading(path):
        content = plain_files.read_bytes(path, MAX_BYTES + 1)  # _decoded reports a larger file
    document, faults = parse_yaml(_decoded(content, path), str(path))
    if faults:
        raise InputError(faults)
    return document


def read_text(path: Path) -> str:
    """Read a UTF-8 file or pipe of at most MAX_BYTES. Raises InputError."""
    with _reading(path), path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    return _decoded(content, path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(Fault(str(path), f"cannot be read ({error.strerror})", code="SF-CONFIG-FILE")) from None


def _decoded(content: bytes, path: Path) -> str:
    if len(content) > MAX_BYTES:
        raise InputError(
            Fault(str(path), f"is larger than {MAX_BYTES // 1024} KiB", "give a config file", code="SF-CONFIG-FILE")
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            Fault(f"{path}:{line}", "is not UTF-8 text", "save the file as UTF-8", code="SF-CONFIG-FILE")
        ) from None


def parse_yaml(text: str, path: str, *, any_names: bool = False) -> tuple[Document, list[Fault]]:
    """Parse a mapping. Returns it with the faults that leave the rest readable (duplicate keys, tags, anchors).

    any_names: whether keys inside of groups may be empty or have dots, as names of data sets have.

    Raises InputError if reading cannot continue: invalid syntax, no mapping, several documents.
    """
    builder = _Builder(text, path, any_names=any_names)
    data = builder.document()
    if not isinstance(data, dict):
        what = "is empty" if data is None else "does not start with a key"
        raise InputError(Fault(path, what, "write `key: value` lines", code="SF-CONFIG-YAML"))
    return Document(data, builder.keys, builder.values, path), builder.faults


def parse_value(text: str, where: str) -> Any:
    """Parse one command-line value: `1e-4`, `[q_proj, v_proj]`, `{kind: lora}`. Raises InputError."""
    builder = _Builder(text, where, positions=False)
    value = builder.document()
    if builder.faults:
        raise InputError(builder.faults)
    return value


class _Events(Reader, Scanner, Parser):
    """PyYAML's pipeline up to events, without resolver and constructor."""

    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def __iter__(self) -> Iterator[Any]:
        while self.check_event():
            yield self.get_event()


class _Builder:
    """Builds values from events, with the dotted path and position of each."""

    def __init__(self, text: str, path: str, *, positions: bool = True, any_names: bool = False):
        self.text = text
        self.any_names = any_names
        self.path = path
        self.positions = positions
        self.keys: dict[str, Position] = {}
        self.values: dict[str, Position] = {}
        self.faults: list[Fault] = []

    def document(self) -> Any:
        try:
            stream = iter(_Events(self.text))
            next(stream)  # start of the stream
            event = next(stream)
            if isinstance(event, events.StreamEndEvent):
                return None
            if event.version and event.version < (1, 2):
                self._fault(event.start_mark, "%YAML 1.1 changes the meaning of words like no", "remove this line")
            value = self._value(next(stream), stream, "", 0)
            next(stream)  # end of the document
            event = next(stream)
        except (YAMLError, ValueError, OverflowError) as error:  # a bad \U escape is a ValueError in PyYAML
            line, column, what, fix = explain_syntax(error, self.text)
            where = place(self.path, Position(line, column)) if self.positions else self.path
            raise InputError(Fault(where, what, fix, code="SF-CONFIG-YAML")) from None
        if isinstance(event, events.DocumentStartEvent):
            raise InputError(
                Fault(
                    self._where(event.start_mark),
                    "a second document starts here",
                    "keep one per file",
                    code="SF-CONFIG-YAML",
                )
            )
        return value

    def _value(self, event: Any, stream: Iterator[Any], path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            fault = Fault(
                self._where(event.start_mark), f"is nested more than {MAX_DEPTH} levels deep", code="SF-CONFIG-YAML"
            )
            raise InputError(fault)
        self.values[path] = _position(event.start_mark)
        if isinstance(event, events.AliasEvent):
            self._fault(event.start_mark, f"alias *{event.anchor} is not supported", "write the value out")
            return None
        if event.anchor is not None:
            self._fault(event.start_mark, f"anchor &{event.anchor} is not supported", "remove it")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._fault(event.start_mark, f"tag {tag} is not supported", "write a plain value")
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, events.SequenceStartEvent):
            return self._sequence(stream, path, depth)
        return self._mapping(stream, path, depth)

    def _scalar(self, event: events.ScalarEvent) -> Any:
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in event.value):
            self._fault(event.start_mark, "\\0 and lone surrogates are not valid text", "write the character itself")
            return ""
        if not event.implicit[0]:  # quoted, or a block scalar
            return event.value
        try:
            return plain_scalar(event.value)
        except ValueError:
            self._fault(event.start_mark, f"a number of {len(event.value)} digits", "put it in quotes if it is text")
            return None

    def _sequence(self, stream: Iterator[Any], path: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(stream), events.SequenceEndEvent):
            items.append(self._value(event, stream, _join(path, str(len(items))), depth + 1))
        return items

    def _mapping(self, stream: Iterator[Any], path: str, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(stream), events.MappingEndEvent):
            name = self._key(event, path)
            key_path = _join(path, name or "")
            if name in items:
                first = self.keys[key_path].line
                self._fault(event.start_mark, f"{key_path}: duplicate key, first given in line {first}", "keep one")
            if name is not None:
                self.keys[key_path] = _position(event.start_mark)
            value = next(stream)
            built = self._value(value, stream, key_path, depth + 1)
            if name is None:
                continue  # reported; its value cannot be addressed
            items[name] = built
            if isinstance(value, events.ScalarEvent) and value.start_mark.index == value.end_mark.index:
                self.values[key_path] = self.keys[key_path]  # no value after the colon: point at the key
        return items

    def _key(self, event: Any, path: str) -> str | None:
        """Return the key, or None after reporting an invalid one."""
        if not isinstance(event, events.ScalarEvent):
            raise InputError(Fault(self._where(event.start_mark), "a key must be a plain name", code="SF-CONFIG-YAML"))
        if event.value == "<<" and event.implicit[0]:
            self._fault(event.start_mark, "merge keys (<<) are not supported", "write the keys out")
        elif self.any_names and path and not (event.anchor or event.tag) and isinstance(self._scalar(event), str):
            return event.value
        elif "." in event.value:
            nested = event.value.replace(".", ": {") + ": …" + "}" * event.value.count(".")
            self._fault(event.start_mark, f"{_join(path, event.value)}: a key cannot contain a dot", f"write {nested}")
        elif event.anchor or event.tag or not event.value or not isinstance(self._scalar(event), str):
            self._fault(event.start_mark, f"{_join(path, event.value)}: a key must be a plain name")
        else:
            return event.value
        return None

    def _where(self, mark: Mark) -> str:
        return place(self.path, _position(mark)) if self.positions else self.path

    def _fault(self, mark: Mark, what: str, fix: str = "") -> None:
        self.faults.append(Fault(self._where(mark), what, fix, code="SF-CONFIG-YAML"))


def place(path: str, position: Position) -> str:
    return f"{path}:{position.line}:{position.column}"


def _position(mark: Mark) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
