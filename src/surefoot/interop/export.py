"""Write a surefoot config as one of another tool, with an account of every key: the way back from `translate`.

    written = export(targets()["trl"], config, given, ours)
    written.text, written.files, written.fates, written.command

The rows that translate a tool's settings also say how each is written (`Row.back`). What is written is then translated
as if a user had brought it, and the account is the comparison of that config with the first: nothing is carried over
because a table says so. Settings that the translation refuses or that have no effect are left out again.
"""

from __future__ import annotations

import math
import posixpath
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.config.dump import dump_plain, shown
from surefoot.config.load import check_config
from surefoot.config.schema import RunConfig
from surefoot.config.types import Duration
from surefoot.interop.backward import NULL, Ours, Sources, processes
from surefoot.interop.launch import Options
from surefoot.interop.registry import tools, translate_command
from surefoot.interop.tool import Rows, Target
from surefoot.interop.translation import Translation, one_line
from surefoot.method_facts.methods import METHODS
from surefoot.system.errors import Fault, InputError

Outcome = Literal["carried", "changed", "different", "lost"]


@dataclass(frozen=True)
class Fate:
    """What became of one key.

    outcome: "carried" over; "changed", with the same value in the config and another meaning; "different", if the
        tool has another value; "lost", if it has nothing for it.
    value: of the config. there: what a translation of the written settings has. settings: the tool's, as written.
    """

    key: str
    outcome: Outcome
    value: Any
    there: Any = None
    settings: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Written:
    """text: the config, with the account as comments. files: others beside it. command: what starts the training."""

    text: str
    files: Mapping[str, str]
    fates: tuple[Fate, ...]
    command: str


def targets() -> dict[str, Target]:
    """Return the tools that configs can be written for, by their name on the command line."""
    return {tool.target.file.partition(".")[0]: tool.target for tool in tools() if tool.target is not None}


def export(target: Target, config: RunConfig, given: AbstractSet[str], ours: Ours) -> Written:
    """Write a config for a tool. given: dotted keys that the user wrote. Raises InputError if the tool has no such
    method."""
    tried = [_written(target, config, given, ours, method, rows) for method, rows in target.rows(ours).items()]
    if not tried:
        stage = ours["stage"]
        what, fix = f"{target.name} has nothing for stage {stage}", "use another --as"
        raise InputError(Fault("stage", what, fix, code="SF-TRANSLATE-SETTING"))
    return min(tried, key=lambda one: len(_different(one.fates)))


def summary(fates: Collection[Fate]) -> str:
    """Format "12 keys carried over, 1 with another meaning, 2 different, 1 lost"."""
    count = Counter(fate.outcome for fate in fates)
    keys = "key" if count["carried"] == 1 else "keys"
    return (
        f"{count['carried']} {keys} carried over, {count['changed']} with another meaning, "
        f"{count['different']} different, {count['lost']} lost"
    )


_HEADINGS: Mapping[Outcome, str] = {
    "changed": "The same value with another meaning there",
    "different": "Different there",
    "lost": "Lost",
}


def account(fates: Collection[Fate]) -> Iterator[str]:
    """Yield a line for every key that is not carried over unchanged, under headings."""
    for outcome, title in _HEADINGS.items():
        chosen = [fate for fate in fates if fate.outcome == outcome]
        yield from ([f"{title}:"] if chosen else [])
        for fate in chosen:
            there = f" -> {shown(fate.there)}" if outcome == "different" else ""
            yield f"  {fate.key}: {shown(fate.value)}{there}{f' ({fate.why})' if fate.why else ''}"


def _written(
    target: Target, config: RunConfig, given: AbstractSet[str], ours: Ours, method: str, rows: Rows
) -> Written:
    proposed = _proposed(rows, ours)
    chosen = (name for name, value in proposed.items() if value != rows[name].default or name in target.always)
    fixed = target.fixed(ours)
    settings = {**fixed, **{name: proposed[name] for name in chosen}}
    files, path = target.files(ours), posixpath.join(ours.folder, target.file)
    beside = {posixpath.join(ours.folder, name): text for name, text in files.items()}
    command = target.start(ours, method, path)
    refused: dict[str, str] = {}  # setting that is left out -> why

    def fates_of(settings: dict[str, Any]) -> tuple[Fate, ...]:
        while True:
            texts = {**beside, path: dump_plain(_nested(settings))}
            try:
                found = translate_command(command, _options(texts, ours))
            except InputError as error:
                _mend(target, settings, proposed, error, refused)
                continue
            if not _drop_idle(settings, fixed, found, refused):
                return tuple(_fates(target, config, given, ours, rows, found, refused, beside))

    fates = fates_of(settings)
    for name in proposed.keys() - settings.keys() - refused.keys():
        wrong = _different(fates)
        if any(_within(key, own) for own in rows[name].keys for key in wrong):
            # The tool's own default, where leaving it out may be something else.
            tried = {**settings, name: proposed[name]}
            if len(_different(again := fates_of(tried))) < len(wrong):
                settings, fates = tried, again
    started = shlex.join(command)
    heading = f"# Written by surefoot for {target.name}. Start it with: {started}\n"
    lines = [f"{name}: {shown(value)}\n" for name, value in _nested(settings).items()]
    comments = [f"# {one_line(line)}\n" for line in (f"{summary(fates)}.", *account(fates))]
    return Written("".join((heading, *lines, "\n", *comments)), files, fates, started)


def _different(fates: Collection[Fate]) -> list[str]:
    return [fate.key for fate in fates if fate.outcome in ("different", "lost")]


def _options(texts: Mapping[str, str], ours: Ours) -> Options:
    def read(path: str) -> str:
        return texts[path] if path in texts else ours.options.read(path)

    return Options(read=read, devices=processes(ours), first=ours.record)


def _proposed(rows: Rows, ours: Ours) -> dict[str, Any]:
    """Return what the rows' ways back say."""
    others = tuple(f"{one.section}." for one in METHODS.values() if one.section not in (None, ours.facts.section))
    found: dict[str, Any] = {}
    for row in rows.values():
        if row.back is None and (len(row.keys) != 1 or row.kind not in ("carried", "joint")):
            continue
        if row.keys and all(key.startswith(others) for key in row.keys):
            continue  # of a method that does not train here
        value = row.back(ours) if row.back else ours[row.keys[0]]
        if value is NULL:
            found[row.name] = None
            continue
        try:
            checked = row.type(value) if row.type and value is not None else value
        except ValueError:
            continue
        if checked is not None:
            found[row.name] = checked if isinstance(checked, bool | int) else value
    return found


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of a dotted name in a group."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        group, _, last = name.rpartition(".")
        (found.setdefault(group, {}) if group else found)[last] = value
    return found


def _mend(
    target: Target, settings: dict[str, Any], proposed: Mapping[str, Any], error: InputError, refused: dict[str, str]
) -> None:
    """Take out the first setting that a fault names, or write it if it is missed; the other faults may follow from it.
    Raises InputError if faults name none: the tool has no such training."""
    for fault in error.faults:
        name, _, why = fault.what.partition(": ")
        if name in settings:
            del settings[name]
            refused[name] = why
            return
        if name in proposed and name not in refused:
            settings[name] = proposed[name]
            return
    told = [refused.get(fault.what.partition(":")[0]) or fault.what for fault in error.faults]
    raise InputError(
        [replace(fault, where=target.name, what=what) for fault, what in zip(error.faults, told, strict=True)]
    )


def _drop_idle(settings: dict[str, Any], fixed: Mapping[str, Any], found: Translation, refused: dict[str, str]) -> bool:
    """Take out the settings that have no effect. Returns whether there were any."""
    idle = [
        name
        for name in settings.keys() - fixed.keys()
        if any(_about(note, name) and note.outcome == "listed" for note in found.notes)
    ]
    for name in idle:
        del settings[name]
        refused[name] = ""
    return bool(idle)


def _about(note: Any, setting: str) -> bool:
    return note.where != "" and note.word.partition(":")[0] == setting


def _fates(
    target: Target, config: RunConfig, given: AbstractSet[str], ours: Ours, rows: Rows, found: Translation,
    refused: Mapping[str, str], beside: Mapping[str, str],
) -> Iterator[Fate]:  # fmt: skip
    again = check_config(found.config, files=False)
    theirs = Ours(again, ours.folder)
    mine = leaves(ours, config)
    back = leaves(theirs, again, [target.origin(ours, source) for source in theirs.train],
                  [target.origin(ours, source) for source in theirs.eval])  # fmt: skip
    back["data.template"] = beside.get(back["data.template"], back["data.template"])
    known = {key for row in rows.values() for key in row.keys}
    written = {key for key, _ in _flat(found.config, "")}
    asked = {*given, *(key for name, key in _OF_SOURCES.items() if name in given)}
    for key in dict.fromkeys((*mine, *back)):
        if key == "data.eval" and not (key in mine and key in back):
            continue  # one of the two has sources, whose own keys follow
        notes = [note for note in found.notes if any(_within(key, own) for own in note.keys)]
        words = tuple(dict.fromkeys(note.word for note in notes if note.outcome != "assumed"))
        value, there = mine.get(key), back.get(key)
        said = any(_within(key, one) or _within(one, key) for one in asked)
        if not _equal(value, there):
            rows_of_it = [row for row in rows.values() if any(_within(key, own) for own in row.keys)]
            why = "; ".join(refused[row.name] for row in rows_of_it if refused.get(row.name))
            why = why or "; ".join(dict.fromkeys(note.why for note in notes if note.why and note.outcome != "carried"))
            missing = not notes and not rows_of_it
            why = why or target.remarks.get(key) or (f"{target.name} has no such setting" if missing else "")
            yield Fate(key, "lost" if missing else "different", value, there, words, why)
        elif said and not (notes or key in written or any(_within(key, own) for own in known)):
            yield Fate(key, "lost", value, None, (), f"{target.name} has no such setting")
        elif said:
            changed = "; ".join(dict.fromkeys(note.why for note in notes if note.outcome == "changed"))
            yield Fate(key, "changed" if changed else "carried", value, there, words, changed)
    for key in sorted(given - _OF_SOURCES.keys()):
        if not any(_within(one, key) or _within(key, one) for one in (*mine, *back)):
            yield Fate(key, "carried", ours[key], None, (), "has no effect in this run")


# Settings of all sources, which `leaves` has at each source.
_OF_SOURCES = {"data.format": "data.train.format", "data.max_samples": "data.train.max_samples"}


def _within(key: str, other: str) -> bool:
    """Whether the key is the other one or in its group."""
    plain = key.partition("[")[0] if "[" in key else key
    return plain == other or key.startswith(f"{other}.") or plain.startswith(f"{other}.")


def leaves(ours: Ours, config: RunConfig, train: Sources | None = None, held: Sources | None = None) -> dict[str, Any]:
    """Return the config's values by key, in a form in which equal runs have equal values.

    train, held: the sources, if not those of the config.
    """
    found = {key: value for key, value in _flat(ours.plain, "") if key not in ("adapter", "early_stopping")}
    for name in ("data.format", "data.max_samples", "data.train", *(["data.eval"] if ours.eval else [])):
        found.pop(name, None)
    if found["model.dropout"] is None:
        found["model.dropout"] = 0.0 if config.method.compared else "own"
    unread = ["eval_every", "checkpoint.best"] if not ours.evaluates else []
    unread += ["optim.warmup_from_zero"] if not found["optim.warmup"] else []
    unread += [name for name in found if name.startswith("tracking.")] if not found["report_to"] else []
    for name in unread:
        found.pop(name)
    for key, sources in (("data.train", train or ours.train), ("data.eval", held or ours.eval)):
        found |= _sources(key, sources)
    return found


def _flat(group: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if isinstance(value, dict) and f"{path}{name}" not in ("data.train", "data.eval"):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _sources(key: str, sources: Sources) -> dict[str, Any]:
    total = sum(source.get("weight") or 0 for source in sources)
    found: dict[str, Any] = {}
    for place, source in enumerate(sources):
        name = key if len(sources) == 1 else f"{key}[{place}]"
        whole = {"format": "auto", **source, "path": posixpath.normpath(source["path"])}
        whole |= {"weight": source["weight"] / total} if total and source.get("weight") else {}
        found |= {f"{name}.{part}": value for part, value in whole.items() if value not in (None, {})}
    return found


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same up to the last bits of a float."""
    if isinstance(one, str) and isinstance(other, str) and one != other:
        try:
            long, short = Duration.parse(one), Duration.parse(other)
        except ValueError:
            return False
        return long.unit == short.unit and math.isclose(long.count, short.count)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)
