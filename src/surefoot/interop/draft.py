"""Translate another tool's settings, row by row and rule by rule, and note what became of each.

    draft = Draft(dialect, words)
    draft.set("batch.size", draft["per_device_train_batch_size"] * 4, "per_device_train_batch_size")
    translation = draft.finish("train")

`draft["name"]` is the given value, else the tool's default. A key that `set` writes from given settings is noted as
"carried", or as "changed" when a reason is passed. A key written from defaults alone is noted as "assumed", and is not
written at all when surefoot's default is the same. `finish` raises if a given setting has no note.

surefoot's own keys may stand before another tool's command: `surefoot run log_every=1 -- finetune.py …`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.keys import all_keys
from surefoot.config.overrides import Sources, apply_override, expand_short_forms
from surefoot.config.yaml_reader import Document
from surefoot.interop.faults import setting_error, setting_fault
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Refusal, Row
from surefoot.interop.translation import Note, Outcome, Translation
from surefoot.interop.words import Word
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import MOST, nearest_word
from surefoot.system.redaction import hides, redacted, veiled_value

_RANK: dict[Outcome, int] = {"carried": 0, "assumed": 1, "listed": 2, "changed": 3}


@dataclass(frozen=True)
class Dialect:
    """A tool's settings and the rules that translate them.

    rows: setting name -> row.
    rules: functions that translate the joint rows, called in this order.
    aliases: older name of a setting -> current name.
    elsewhere: another tool's name for a setting -> this tool's name, used for suggestions.
    parts: beginning of the names of settings without a row -> the setting that they belong to, which is off or refused.
    """

    tool: str
    rows: Mapping[str, Row]
    rules: tuple[Callable[[Draft], None], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


class Draft:
    """A translation in progress.

    dialect: the tool's settings and rules.
    words: the given settings; a later one overrides an earlier one of the same name.
    command: the command they come from. Rules read its environment and facts, and may add to the environment.
    options: what else the translation may read, such as files that settings name.
    """

    def __init__(
        self,
        dialect: Dialect,
        words: Sequence[Word],
        command: Command | None = None,
        options: Options | None = None,
    ):
        self.dialect, self.rows = dialect, dialect.rows
        self._words, self._command = words, command
        self.config: dict[str, Any] = {}
        self.options = options or Options()
        self.environment = {} if command is None else dict(command.environment)
        self.facts = {} if command is None else dict(command.facts)
        self.folder = "" if command is None else command.folder
        self.arguments: list[str] = []
        self.resumes: str | None = None  # see Translation
        self.faults: list[Fault] = []
        self._given: dict[str, Word] = {}
        self._values: dict[str, Any] = {}
        self._notes: dict[str, Note] = {}
        self._overridden: list[Note] = []
        for word in words:
            name = dialect.aliases.get(word.name, word.name)
            # For an override the place is its text, and places are printed: hide the secret there, too.
            if self._secret(name) and "=" in word.where:
                word = replace(word, where=f"{word.name}=…")
            if (earlier := self._given.pop(name, None)) is not None:
                why = f"{word.shown} takes precedence"
                self._overridden.append(Note(self._shown(earlier), "listed", (), why, earlier.where))
            self._given[name] = word
        for name, word in self._given.items():
            if name not in self.rows:
                self._unknown(word)
            elif word.value is None:
                self._read_null(self.rows[name])
            else:
                self._values[name] = self._typed(self.rows[name], word)

    def __getitem__(self, name: str) -> Any:
        """The value as given and checked, else the tool's default."""
        return self._values.get(name, self.rows[name].default)

    def given(self, name: str) -> bool:
        """Whether a value was given; null does not count unless the row gives it a meaning."""
        return name in self._values

    def where(self, name: str) -> str:
        return self._given[name].where if name in self._given else ""

    def take(self, name: str, value: Any) -> None:
        """Let a setting have this value, for rules that know it in another form or under another name."""
        self._values[name] = value

    @property
    def processes(self) -> int:
        """Number of processes that have a batch of their own."""
        return self.facts.get("processes", 1)

    def written(self, key: str) -> Any:
        """Return the value written to a surefoot key so far, or None."""
        value: Any = self.config
        for step in key.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return value

    def set(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Write one surefoot key.

        names: the settings that decide it. If none is given and surefoot's default is the same, nothing is written.
        why: how surefoot differs from the tool, if it does.
        """
        given = [name for name in names if self.given(name)]
        ours = all_keys()[key]
        # Writing out every default would hide the few lines that the user chose.
        if not given and value == ours.default and not ours.required:
            return
        group = self.config
        *groups, last = key.split(".")
        for step in groups:
            group = group.setdefault(step, {})
        group[last] = value
        for name in given:
            self.note(name, "changed" if why else "carried", why, key)
        if not given and not (ours.required and ours.default is None and not names):
            instead = "" if ours.required or ours.default is None else f"; surefoot's is {shown(ours.default)}"
            because = why or f"the default of {self.dialect.tool}{instead}"
            word = ", ".join(f"{name}: {shown(self.rows[name].default)}" for name in names) or key
            self._notes[f"assumed {key}"] = Note(word, "assumed", (key,), because)

    def note(self, name: str, outcome: Outcome, why: str = "", *keys: str) -> None:
        """Note what became of a given setting. A second note is merged into the first. No-op if not given."""
        if name not in self._given:
            return
        word, before = self._given[name], self._notes.get(name)
        if before is not None:
            outcome = max(before.outcome, outcome, key=_RANK.__getitem__)
            # One rule carried the setting over, another found a part without counterpart: together that is a change.
            if "listed" in (before.outcome, outcome) and (before.keys or keys):
                outcome = "changed"
            keys = tuple(dict.fromkeys((*before.keys, *keys)))
            why = "; ".join(dict.fromkeys(reason for reason in (before.why, why) if reason))
        self._notes[name] = Note(self._shown(word), outcome, tuple(keys), why, word.where)

    def drop(self, why: str, *names: str) -> None:
        """Note that these settings have no counterpart and need none."""
        for name in names:
            self.note(name, "listed", why)

    def refuse(self, name: str, what: str, fix: str = "") -> None:
        fault = _fault(self.where(name), name, what, fix)
        if fault not in self.faults:  # two rules may report the same fault
            self.faults.append(fault)
        self.note(name, "listed", "refused")

    def assume(self, word: str, why: str, *keys: str) -> None:
        """Note an assumption that is not the default of a single row."""
        self._notes[f"assumed {word}"] = Note(word, "assumed", keys, why)

    def add_note(self, note: Note) -> None:
        """Add a note on a setting inside a file that a given setting names."""
        self._notes[f"inside {note.where} {note.word}"] = note

    def finish(self, command: str) -> Translation:
        """Apply the rows, then the rules, and return the translation. Raises InputError with every fault.

        command: the surefoot command that runs the translation.
        """
        for row in self.rows.values():
            value = self._given[row.name].value if self.given(row.name) else row.default
            if row.required and value in (None, "", []):
                self.refuse(row.name, "is required", row.required)
            self._apply(row)
        for rule in self.dialect.rules:
            rule(self)
        for name in [name for name in self._given if name not in self._notes and not self.faults]:
            if self[name]:  # no rule has read it, and no setting is dropped silently
                unread = f"{self._shown(self._given[name])} has no effect with the other settings"
                self.refuse(name, unread, "leave it out")
            else:
                self.drop("is off or not set", name)
        if self.faults:
            raise InputError(self.faults)
        order = {name: place for place, name in enumerate(self._given)}
        notes = sorted(self._notes.items(), key=lambda item: order.get(item[0], len(order)))
        return Translation(
            tool=self.dialect.tool,
            command=command,
            config=in_schema_order(self.config),
            notes=(*self._overridden, *(note for _, note in notes)),
            arguments=tuple(self.arguments),
            resumes=self.resumes,
            given=self._read_values(),
            environment=self.environment,
            with_value=lambda name, value: self._with_value(command, name, value),
        )

    def _with_value(self, command: str, name: str, value: Any) -> Mapping[str, Any]:
        word = Word(name, value, name, f"{name}: {shown(value)}")
        try:
            return Draft(self.dialect, [*self._words, word], self._command, self.options).finish(command).config
        except InputError:
            return {}

    def _apply(self, row: Row) -> None:
        if not self.given(row.name) and row.kind != "carried":
            return
        if self.given(row.name) and row.name in self._notes:
            return
        value = self[row.name]
        if row.kind == "carried":
            try:
                converted = row.convert(value) if row.convert else value
            except Refusal as refusal:
                self.refuse(row.name, refusal.what, refusal.fix)
                return
            if converted is None and not self.given(row.name):
                return
            self.set(row.keys[0], converted, row.name, why=row.about if self.given(row.name) else "")
        elif row.kind == "listed":
            self.drop(row.about, row.name)
        elif row.kind == "refused":
            if value == row.default or value in row.same:
                self.drop("is off or not set", row.name)
            else:
                self.refuse(row.name, row.about, row.fix)

    def _read_null(self, row: Row) -> None:
        if isinstance(row.when_null, Refusal):
            self.refuse(row.name, row.when_null.what, row.when_null.fix)
        elif row.when_null is None:
            self.note(row.name, "listed", "null: treated as not given")
        else:
            self._values[row.name] = row.when_null

    def _typed(self, row: Row, word: Word) -> Any:
        value = word.value
        if row.is_text and word.written is not None and isinstance(value, bool | int | float):
            value = word.written  # a name made of digits is text
        if row.type is None:
            return value
        try:
            return row.type(value)
        except (ValueError, OverflowError) as error:
            got = "…" if self._secret(row.name) else shown(veiled_value(word.value))
            self.faults.append(_fault(word.where, row.name, f"expected {error}, got {got}"))
            return row.default

    def _unknown(self, word: Word) -> None:
        if whole := next((whole for start, whole in self.dialect.parts.items() if word.name.startswith(start)), None):
            self.note(word.name, "listed", f"belongs to {whole}")
            return
        if self.options.allow_unknown:
            self.note(word.name, "listed", f"unknown setting of {self.dialect.tool}")
            return
        near = self.dialect.elsewhere.get(word.name)
        # Only MOST faults are shown, and a file of another tool may have thousands of unknown settings.
        near = near or (nearest_word(word.name, self.rows) if len(self.faults) < MOST else None)
        known = f"did you mean {near}?" if near else "check the name, or ignore it with: surefoot run --allow-unknown"
        what = f"is no setting of {self.dialect.tool} that surefoot knows"
        self.faults.append(_fault(word.where, word.name, what, known))

    def _shown(self, word: Word) -> str:
        if self._secret(word.name):
            return f"{word.name}: …"
        name = re.match(r"[^:= ]*", word.shown)
        known = name[0] if name and word.name in self.rows else ""  # a long known name would look like a secret
        return known + redacted(word.shown[len(known) :])

    def _secret(self, name: str) -> bool:
        return hides(name) or (name in self.rows and self.rows[name].secret)

    def _read_values(self) -> dict[str, Any]:
        values = {name: row.default for name, row in self.rows.items()} | self._values
        unread = {name: word.value for name, word in self._given.items() if name not in self.rows or word.value is None}
        values |= unread
        return {
            name: "…" if value is not None and self._secret(name) else veiled_value(value)
            for name, value in values.items()
        }


def in_schema_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its keys in the order of the schema."""
    places = {key: place for place, key in enumerate(all_keys())}

    def ordered(group: Mapping[str, Any], path: str) -> dict[str, Any]:
        def place(name: str) -> int:
            return places.get(f"{path}{name}", len(places))

        return {
            name: ordered(group[name], f"{path}{name}.") if isinstance(group[name], dict) else group[name]
            for name in sorted(group, key=place)
        }

    return ordered(config, "")


def _fault(where: str, name: str, what: str, fix: str = "") -> Fault:
    named = where.lstrip("-").replace("-", "_").partition("=")[0] == name  # a flag or an override, not a line of a file
    return setting_fault(where, what if named else f"{name}: {what}", fix)


def with_overrides(found: Translation, texts: Sequence[str]) -> Translation:
    """Apply `key=value` overrides of surefoot keys to a translation. Raises InputError."""
    if not texts:
        return found
    if found.command != "train":
        what = f"sets a training key, but the command is for {found.command}"
        raise setting_error(texts[0], what, "leave it out")
    config, sources = expand_short_forms(dict(found.config)), Sources(Document({}, {}, {}, ""))
    for text in texts:
        config = apply_override(config, text, sources)
    set_here = tuple(Note(text, "carried", (key,), "", text) for key, text in sources.overrides.items())
    notes = (_without(note, sources.overrides) for note in found.notes)
    return replace(found, config=in_schema_order(config), notes=(*(note for note in notes if note), *set_here))


def _without(note: Note, overrides: dict[str, str]) -> Note | None:
    """Return the note without its overridden keys: None for an overridden default, else with the reason."""
    gone = {key: text for key in note.keys for name, text in overrides.items() if f"{key}.".startswith(f"{name}.")}
    if not gone:
        return note
    keys = tuple(key for key in note.keys if key not in gone)
    if note.outcome == "assumed":
        return replace(note, keys=keys) if keys else None
    why = "; ".join(part for part in (note.why, f"{', '.join(gone.values())} takes precedence") if part)
    return replace(note, outcome="changed" if keys else "listed", keys=keys, why=why)
