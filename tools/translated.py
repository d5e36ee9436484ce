"""Say what `surefoot translate` makes of the configs and commands in folders: totals by tool, fate and reason.

    python tools/translated.py axolotl/examples torchtune/recipes/configs
    python tools/translated.py --list --only Axolotl axolotl/examples          # also a line for each file

Read are YAML and JSON files that a tool claims, and commands in shell files, READMEs and comments. A fate is one of
complete (every setting carried over), leftovers (some changed or without counterpart), refused, absent (a command whose
config is neither in the folder nor beside the file that quotes it), other (evaluation, generation: no training) and
crashed. No command runs. A command is read in the nearest folder above its file that has its program; sentences and
commands with placeholders are left out, and the arguments of a shell file are 1. A value is lost if another value in
its place gives the same translation, and no note says so: neither a reason on the setting itself, nor that a setting
around it has no counterpart.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.commands.translate import reading_options
from surefoot.config.load import check_config
from surefoot.interop.launch import Options, read_command
from surefoot.interop.registry import file_tool, tools, translate_command, translate_file
from surefoot.interop.script import SCRIPT
from surefoot.interop.translation import Translation
from surefoot.interop.words import parse_document, top_keys
from surefoot.system.errors import InputError, SurefootError

CONFIGS, TEXTS = (".yaml", ".yml", ".json"), (".sh", ".md", ".mdx", ".rst", ".qmd", ".yaml", ".yml", ".txt")
MOST_BYTES = 200_000  # larger ones are data
TRAINS = {"base_model", "learning_rate", "model", "model_name_or_path"}  # every config of a training has one
FATES = ("complete", "leftovers", "refused", "absent", "other", "crashed")
_ABSENT = ("No such file or directory", "is a config inside torchtune")
_OTHER = ("is no training", "names no program", "runs inline code", "has no counterpart in surefoot")
_STARTS = re.compile(
    r"(?:\w+=\S* +)*(?:accelerate launch|axolotl train|deepspeed|lmf|llamafactory-cli|python3?|swift|torchrun|trl"
    r"|tune run)\s"
)
_MARKS = re.compile(r"^[\s#>$%*`]+|`+\s*$")
_SET = re.compile(r"""(?:export\s+)?([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\S*)\s*;?""")
_USED = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_SHARE = re.compile(r"\$\(expr (\d+) / (\d+)\)")
_PLACEHOLDER = re.compile(r"\.\.\.|[-→]|<\w+>|\{\w+\}")
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\[\d+\]|(?<![\w.])-?\d[\d.e-]*")
Translate = Callable[[Any], Translation]


@dataclass(frozen=True)
class Item:
    """One config or command.

    name: the file, with the command if it is one. tool: its tool and whether it is a file or a command.
    reasons: of its refusal. lost: paths of the values without a fate.
    """

    name: str
    tool: str
    fate: str
    reasons: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description="what surefoot translate makes of configs and commands in folders")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="name of one tool")
    parser.add_argument("--list", action="store_true", help="also print every item with its fate and reasons")
    parser.add_argument("--most", type=int, default=30, help="reasons to print for each tool")
    args = parser.parse_args()
    items = [item for folder in args.folders for item in read_folder(folder) if item.tool.startswith(args.only)]
    print("\n".join(report(items, args.most)))
    if args.list:
        print("\n".join(f"{one.fate:<10} {one.name}: {'; '.join(one.reasons + one.lost)}" for one in items))


def read_folder(folder: Path) -> Iterator[Item]:
    """Translate everything in a folder once. Paths in commands and configs are relative to it."""
    seen: set[tuple[str, ...]] = set()
    with contextlib.chdir(folder):
        options = replace(reading_options(), environment={}, devices=1)
        for path in sorted(path for path in Path().rglob("*") if path.is_file()):
            if path.suffix not in {*CONFIGS, *TEXTS} or path.stat().st_size > MOST_BYTES:
                continue
            text = path.read_text(errors="replace")
            if path.suffix in CONFIGS and (item := of_file(path.as_posix(), text, options)) is not None:
                yield item
            for words in commands(text) if path.suffix in TEXTS else ():
                place = start_of(words, path)
                if (place, *words) in seen:
                    continue
                seen.add((place, *words))
                item = in_folder(place, path, words, options)
                if item is not None and item.fate == "absent":
                    item = in_folder(path.parent.as_posix(), path, words, options)
                if item is not None:
                    yield item


def start_of(words: list[str], path: Path) -> str:
    """Return the nearest folder above a file that has the script which the command starts, else the folder itself."""
    script = next((word for word in words if word.endswith(".py")), None)
    folders = [one.as_posix() for one in path.parents] if script else []
    return next((one for one in folders if (Path(one) / str(script)).is_file()), ".")


def in_folder(place: str, path: Path, words: list[str], options: Options) -> Item | None:
    with contextlib.chdir(place):
        return of_command(path.as_posix(), words, replace(options, folder=Path.cwd().as_posix()))


def of_file(path: str, text: str, options: Options) -> Item | None:
    """Return what becomes of a config; None for a file that is none."""
    tool = file_tool(path, text)
    if tool is None:
        unknown = path.endswith((".yaml", ".yml")) and top_keys(path, text) & TRAINS
        return Item(path, "no tool's files", "refused", ("no tool claims it",)) if unknown else None
    return judged(
        path,
        f"{tool.name} files",
        lambda: translate_file(path, text, [], options),
        lambda: _in_file(path, text, options),
    )


def of_command(path: str, words: list[str], options: Options) -> Item | None:
    """Return what becomes of a command; None if it is no known tool's."""
    try:
        command = read_command(words, options)
        tool = next((tool for tool in tools() if tool.claims_command(command)), SCRIPT)
    except InputError as error:  # a launcher's flag
        return refused(f"{path}: {shlex.join(words)}", "launchers", error)
    if tool is SCRIPT:
        return None
    return judged(
        f"{path}: {shlex.join(words)}",
        f"{tool.name} commands",
        lambda: translate_command(words, options),
        lambda: (words, lambda changed: translate_command(changed, options)),
    )


def judged(
    name: str, tool: str, translate: Callable[[], Translation], source: Callable[[], tuple[Any, Translate]]
) -> Item:
    """Translate, check the config, and look for values without a fate.

    source: returns the settings, and a function that translates a changed copy of them.
    """
    try:
        found = translate()
        if found.config:
            check_config(found.config, files=False)
        lost = tuple(lost_values(*source()))
    except SurefootError as error:
        return refused(name, tool, error)
    except Exception as error:
        return Item(name, tool, "crashed", (f"{type(error).__name__}: {error}",))
    whole = all(note.outcome in ("carried", "assumed") for note in found.notes)
    return Item(name, tool, "complete" if whole else "leftovers", (), lost)


def refused(name: str, tool: str, error: SurefootError) -> Item:
    reasons = _reasons(error)
    fates = (("absent", _ABSENT), ("other", _OTHER))
    alone = [fate for fate, marks in fates if len(reasons) == 1 and any(mark in reasons[0] for mark in marks)]
    return Item(name, tool, alone[0] if alone else "refused", reasons)


def _in_file(path: str, text: str, options: Options) -> tuple[Any, Translate]:
    data, as_json = dict(parse_document(text, path).data), f"{path.rpartition('.')[0]}.json"
    return data, lambda changed: translate_file(as_json, json.dumps(changed), [], options)


def lost_values(data: Any, translate: Translate) -> Iterator[str]:
    """Yield the path of each value, nested ones too, whose change leaves config and notes as they are.

    Notes repeat the value, so only their outcome and reason count.
    """
    before = translate(data)
    for path in leaves(data):
        changed = copy.deepcopy(data)
        group = changed
        for step in path[:-1]:
            group = group[step]
        group[path[-1]] = another(group[path[-1]])
        try:
            after = translate(changed)
        except (SurefootError, ValueError):
            continue  # it is read
        if _told(before) == _told(after) and not _is_explained(before, path, data):
            yield ".".join(map(str, path))


def _told(found: Translation) -> Any:
    notes = sorted((note.outcome, note.keys, note.why, _name(note.word)) for note in found.notes)
    return found.command, found.config, found.arguments, found.environment, found.resumes, notes


def _is_explained(found: Translation, path: tuple[Any, ...], data: Any) -> bool:
    """Whether a note says that the value, or a setting that holds it, has no counterpart."""
    if isinstance(data, list):  # a command: the flag precedes its value, or is in the same word
        word = str(data[path[0]])
        own = _name(word if "=" in word or path[0] == 0 else str(data[path[0] - 1]))
        around = {own}
    else:
        own = _dotted(path[:-1] if isinstance(path[-1], int) else path)  # an item of a list belongs to its setting
        around = {_dotted(path[: end + 1]) for end in range(len(path))}
    last = str(path[-1])  # of a file or group that a setting names, the place is that setting
    return any(
        (name == own and note.why)
        or (note.outcome == "listed" and (name in around or (note.where in around and last.endswith(name))))
        for note, name in ((note, _name(note.word)) for note in found.notes)
    )


def _name(word: str) -> str:
    return re.split("[:= ]", word.lstrip("-"), maxsplit=1)[0].replace("-", "_")


def _dotted(path: tuple[Any, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def leaves(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value that is neither null nor a group."""
    for step, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            yield from leaves(value, (*before, step))
        elif value is not None and not (not before and isinstance(data, list) and _starts(step, value)):
            yield (*before, step)


def _starts(place: int, word: Any) -> bool:
    """Whether a word of a command is the program or a flag, and no value."""
    return place == 0 or str(word).startswith("-")


def another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return f"{value}1" if value.lower() not in ("true", "false") else {"true": "false", "false": "true"}[value.lower()]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands in a shell file, a page or comments, with `\\` at ends of lines joined and variables replaced
    by what the same file assigns to them."""
    variables: dict[str, str] = {}
    joined = re.sub(r"\\[ \t]*\n[\s#>]*", " ", text)
    for line in joined.splitlines():
        line = _MARKS.sub("", line)
        if (found := _SET.fullmatch(line.strip())) is not None:
            variables[found[1]] = _filled(found[2].strip("\"'"), variables)
        elif _STARTS.match(f"{line} "):
            plain = re.split(r"\s+(?:[|&;>]|2>)|\|tee|`", line)[0]
            try:
                words = shlex.split(re.sub(r"(?<=\s)#.*", "", _filled(plain, variables)))
            except ValueError:
                continue  # a sentence with an apostrophe
            if not any(map(_PLACEHOLDER.fullmatch, words)):
                yield words


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Put in the variables' values; an argument of the shell file, which may be a number, is 1."""

    def value(use: re.Match[str]) -> str:
        name = use[1] or use[3]
        return variables.get(name, use[2] or ("1" if name.isdigit() else ""))

    return _SHARE.sub(lambda found: str(int(found[1]) // max(1, int(found[2]))), _USED.sub(value, text))


def _reasons(error: SurefootError) -> tuple[str, ...]:
    """Return the faults without values and places, so that the same reason reads the same in every file."""
    return tuple(dict.fromkeys(_VALUES.sub("…", fault.what) for fault in error.faults))


def report(items: list[Item], most: int) -> list[str]:
    lines = [f"{'tool':<40} {'items':>6} {' '.join(f'{fate:>10}' for fate in FATES)} {'lost values':>12}"]
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.tool].append(item)
    for name, group in sorted(groups.items()):
        fates = Counter(item.fate for item in group)
        lost = sum(len(item.lost) for item in group)
        lines.append(f"{name:<40} {len(group):>6} {' '.join(f'{fates[fate]:>10}' for fate in FATES)} {lost:>12}")
    for name, group in sorted(groups.items()):
        because = [item.reasons for item in group if item.fate in ("refused", "crashed")]
        counts = Counter(reason for reasons in because for reason in reasons)
        alone = Counter(reasons[0] for reasons in because if len(reasons) == 1)
        lost = Counter(re.sub(r"\.\d+\b", "[]", path) for item in group for path in item.lost)
        lines += ["", f"{name}: reasons (items; items with no other reason)"] if counts else []
        lines += [f"{count:>5} {alone[reason]:>5}  {reason}" for reason, count in counts.most_common(most)]
        lines += ["", f"{name}: values without a fate"] if lost else []
        lines += [f"{count:>5}  {path}" for path, count in lost.most_common(most)]
    return lines


if __name__ == "__main__":
    main()
