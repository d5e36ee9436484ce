"""The result of translating a config or command: a surefoot config, and a note on every original setting.

    print(as_yaml(translation))      # loads with `surefoot train`; a comment per line says where it came from

Nothing is dropped silently. A setting is carried over; changed, with the reason; assumed, if the other tool's default
differs from surefoot's and is therefore written out; or listed as without counterpart, with the reason. A setting that
surefoot does not know or does not support is an error, not a note. `locate` maps a fault in the translated config back
to the setting that caused it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from surefoot.config.dump import shown
from surefoot.config.keys import schema_key
from surefoot.config.yaml_scalars import scalar_or_text
from surefoot.system.errors import Fault
from surefoot.system.redaction import hides, redacted, veiled_value, veiled_words

Outcome = Literal["carried", "changed", "assumed", "listed"]


@dataclass(frozen=True)
class Note:
    """What became of one setting.

    word: the setting as the user wrote it, such as "lora_rank: 8" or "--lora_r 32"; for an assumption, the default.
    outcome: "carried" over unchanged; "changed"; "assumed", a default of the tool that the user did not give; or
        "listed" as without counterpart.
    keys: dotted surefoot keys that it sets; empty if listed.
    why: the reason, as the end of a sentence; may be empty only if carried over unchanged.
    where: its place, such as "run.yaml:3:1" or the flag; empty for an assumption.
    """

    word: str
    outcome: Outcome
    keys: tuple[str, ...] = ()
    why: str = ""
    where: str = ""


@dataclass(frozen=True)
class Translation:
    """A translated config or command.

    tool: name of the tool, as in the list of dialects.
    command: the surefoot command that runs it, such as "train" or "export".
    config: a surefoot config as plain data if the command takes one, else empty.
    arguments: the command's arguments after the config.
    notes: in the order of the original, assumptions last.
    given: the other tool's arguments as read, with defaults filled in, for training_args.json.
    environment: NAME=value pairs that preceded the command.
    resumes: checkpoint to resume from, or the run folder for its newest one; None if not requested.
    with_value: (setting, value) -> the config if the setting had this value; empty if the tool or surefoot refuses it.
    """

    tool: str
    command: str
    config: Mapping[str, Any]
    notes: tuple[Note, ...]
    arguments: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: str | None = None
    with_value: Callable[[str, Any], Mapping[str, Any]] = field(default=lambda name, value: {}, compare=False)


def said_keys(found: Translation) -> tuple[str, ...]:
    """Return the keys that given settings decide, without those set by the tool's defaults."""
    return tuple(dict.fromkeys(key for note in found.notes if note.outcome != "assumed" for key in note.keys))


GivenMode = Literal["resume", "overwrite"]
MODES = tuple(f"--{mode}" for mode in get_args(GivenMode))


def with_mode(found: Translation, mode: GivenMode | None) -> Translation:
    """Let the command continue ("resume") or replace ("overwrite") a run that is there; None: as translated."""
    if mode is None:
        return found
    return replace(found, arguments=(f"--{mode}", *(word for word in found.arguments if word not in MODES)))


_MARGIN = 44  # column where comments start if values are shorter
_HEADINGS = {
    "changed": "Different here",
    "assumed": "Assumed: defaults that differ",
    "listed": "Without counterpart",
}
_ONE_LINE = ("data.train", "data.eval")  # a source is written on one line
_LINE = re.compile(r"(.+?:\d+)(:\d+)?")


def as_yaml(translation: Translation) -> str:
    """Format the config with comments, the command to run, and the account; only comments if there is no config."""
    body = list(_lines(translation.config, "", translation.notes))
    lines = [f"# {line}" for line in heading(translation)]
    return "\n".join([*map(one_line, lines), *body, "", *map(one_line, account(translation))]) + "\n"


def heading(translation: Translation) -> list[str]:
    """Return the line with the tool and the command to run."""
    environment = " ".join(f"{name}={_safe(name, value)}" for name, value in translation.environment.items())
    words = " ".join(translation.arguments)
    command = f"surefoot {translation.command}{' THIS-FILE' if translation.config else ''} {words}".rstrip()
    return [f"Translated from {translation.tool}. Run with: {environment} {command}".replace(":  ", ": ")]


def summary(translation: Translation) -> str:
    """Format "12 settings carried, 2 changed, 3 without counterpart, 4 defaults assumed"."""
    counts = {kind: sum(note.outcome == kind for note in translation.notes) for kind in ("carried", *_HEADINGS)}
    words = "setting" if counts["carried"] == 1 else "settings"
    text = f"{counts['carried']} {words} carried, {counts['changed']} changed, {counts['listed']} without counterpart"
    return f"{text}, {counts['assumed']} default{'' if counts['assumed'] == 1 else 's'} assumed"


def account(translation: Translation) -> list[str]:
    """Return comment lines for every setting that is not carried over unchanged."""
    lines = [f"# {summary(translation)}."]
    for outcome, title in _HEADINGS.items():
        if chosen := [note for note in translation.notes if note.outcome == outcome]:
            lines += ["#", f"# {title}:"]
            lines += [f"#   {_sentence(note)}" for note in chosen]
    return lines


def to_json(translation: Translation) -> dict[str, Any]:
    """Return the content of training_args.json and of `surefoot translate --json`."""
    return {
        "tool": translation.tool,
        "command": translation.command,
        "arguments": veiled_words(translation.arguments),
        "environment": {name: _safe(name, value) for name, value in translation.environment.items()},
        "given": veiled_value(dict(translation.given)),
        "notes": [_note_to_json(note) for note in translation.notes],
    }


def _note_to_json(note: Note) -> dict[str, Any]:
    """Convert a note; its outcome keeps the key "fate", which existing files have."""
    return {"fate" if name == "outcome" else name: value for name, value in asdict(note).items()}


def locate(translation: Translation, fault: Fault) -> Fault:
    """Move a fault from a surefoot key to the original setting that set it."""
    key = schema_key(re.sub(r"\[(\d+)\]", r".\1", fault.where))
    for name in _upwards(key):
        found = [note for note in translation.notes if any(_same(name, own) for own in note.keys)]
        if found:
            placed = [note for note in found if note.where]
            given = min(placed, key=lambda note: _rank(note, name), default=None)
            if given is None:
                return replace(fault, what=f"{fault.what} ({translation.tool}'s default: {found[0].word})")
            where, word = given.where, given.word
            key_word = "" if word.startswith(where) else f"{word.partition(':')[0]}: "
            return replace(fault, where=where, what=f"{key_word}{fault.what}")
    return fault


def _rank(note: Note, key: str) -> int:
    """Return the position of a key among a note's keys: the setting whose main key it is comes first."""
    return next(place for place, own in enumerate(note.keys) if _same(key, own))


_WORD = r"[\w.+-]*\w"
_VALUE = rf"(?:(?:: ?|=)(?P<value>{_WORD})(?P<others>(?:, {_WORD})* or {_WORD})?)?"  # behind a key


def with_tool_settings(translation: Translation, advice: str) -> str:
    """Replace surefoot keys in advice by the tool's settings, where a single setting decides the key. A key with a
    value stays if the setting has none that means the same; it is then given as one of surefoot's own."""
    as_flags = any(note.where.startswith("--") for note in translation.notes)
    own: list[str] = []

    def means(name: str, value: Any, key: str, wanted: Any) -> bool:
        return _at(translation.with_value(name, value), key) == wanted

    words: dict[str, set[str]] = {}
    for note in translation.notes:
        alone = note.outcome != "assumed" or ", " not in note.word  # an assumption may name several settings
        name = re.split(r"[:= ]", note.word.lstrip("-"), maxsplit=1)[0] if alone else ""
        for key in (key for key in note.keys if "." in key):
            words.setdefault(key, set()).add(name)
    for key, names in words.items():
        if len(names) == 1 and (name := next(iter(names))).isidentifier():
            word, between = (f"--{name}", " ") if as_flags else (name, ": ")

            def in_words(found: re.Match[str], key: str = key, name: str = name, word: str = f"{word}{between}") -> str:
                if found["value"] is None:
                    return word.rstrip(": ")
                wanted, *others = map(scalar_or_text, re.findall(_WORD, found[0])[1:])
                same = [value for value in (wanted, True, False) if means(name, value, key, wanted)]
                if same and all(means(name, value, key, value) for value in others if value != "or"):
                    return f"{word}{shown(same[0])}{found['others'] or ''}"
                own.append(f"{key}={found['value']}")
                return found[0]

            advice = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w.]){_VALUE}", in_words, advice)
    named = f" (surefoot's own: surefoot run {' '.join(own)} -- COMMAND)" if own else ""
    return advice + named


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _lines(group: Mapping[str, Any], path: str, notes: Iterable[Note]) -> Iterator[str]:
    indent = "  " * path.count(".")
    for name, value in group.items():
        key = f"{path}{name}"
        if isinstance(value, dict) and key not in _ONE_LINE:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", notes)
        else:
            yield _commented(f"{indent}{name}: {shown(value)}", _origin(key, notes))


def _commented(line: str, comment: str) -> str:
    return f"{line:<{_MARGIN}} # {one_line(comment)}" if comment else line


def one_line(text: str) -> str:
    """Escape unprintable characters, so that no setting can end its comment and become a line of the config."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _origin(key: str, notes: Iterable[Note]) -> str:
    chosen = [note for note in notes if key in note.keys]
    given = [f"{note.word}{_place(note)}" for note in chosen if note.outcome != "assumed"]
    if given:
        return ", ".join(given)
    return ", ".join(f"assumed: {note.word}" for note in chosen)


def _place(note: Note) -> str:
    """Format " (run.yaml:3)"; empty for a flag, which names itself."""
    found = _LINE.fullmatch(note.where)
    return f" ({found[1]})" if found else ""


def _sentence(note: Note) -> str:
    others = [key for key in note.keys if key != note.word]
    keys = f" -> {', '.join(others)}" if others else ""
    return f"{note.word}{_place(note)}{keys}: {note.why}" if note.why else f"{note.word}{_place(note)}{keys}"


def _upwards(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _same(name: str, own: str) -> bool:
    return name == own or own == f"{name}.path"


def _safe(name: str, value: str) -> str:
    return "…" if hides(name) else redacted(value)
