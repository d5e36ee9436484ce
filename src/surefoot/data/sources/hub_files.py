"""Choose the files of a subset and split of a hub data set, as a pure function of its file list and README.

The `configs` of the README's YAML header decide, if present. Otherwise a subset is a folder (folders named `data` or
after a split belong to their parent), and a split is recognized by the names of folders and files: train, validation
(valid, val, dev), test (eval), or NAME-00000-of-00003, as the hub's tools name shards. If no name shows a split, all
files are train. Local folders are resolved by the same rules.

A README is untrusted input: YAML aliases are refused (a few of them can expand to millions of values), and glob
patterns are matched without backtracking, in time proportional to pattern length times path length.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import DATA_KINDS, DESCRIPTION, data_kind

_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_METADATA = (DESCRIPTION, "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
_PROSE = ("authors", "changelog", "citation", "contributing", "copying", "licence", "license", "notice", "readme")
TO_EVALUATE = ("validation", "test")  # default splits of evaluation data, the first that exists
ROOT = "."  # name of the subset of files that are in no subset folder
_LISTED = 8  # subsets listed in a message
_SCALAR = (str, int, float)  # accepted types of README values; nested lists could have endless text
# File formats by preference, if a repository has a split in several: exact types before text.
_PREFERRED = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
assert set(_PREFERRED) == set(DATA_KINDS)


Splits = tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The files of one split.

    files: paths, sorted.
    part: name of the subset and split.
    reason: how they were recognized.
    """

    files: tuple[str, ...]
    part: str
    reason: str


def choose_files(
    name: str, files: Collection[str], readme: str, subset: str | None, split: str | Splits, folder: str | None = None
) -> Chosen:
    """Choose the files of the requested subset and split.

    name: name of the repository, for messages.
    files: all its paths.
    split: a split, or several, of which the first that exists is used.
    folder: consider only files in this folder.

    Raises InputError, listing the options, if there is no unique choice.
    """
    splits = (split,) if isinstance(split, str) else split
    below = "" if folder is None else folder.strip("/") + "/"
    data = sorted(
        file
        for file in files
        if file.startswith(below) and is_data(file) and not any(part.startswith(".") for part in file.split("/"))
    )
    if not data:
        raise _no_data(name, files, folder)
    if folder is None and (configs := _configs(name, readme)):
        chosen, part, reason = _declared(name, configs, data, subset, splits)
    else:
        chosen, part, reason = _by_name(name, [file.removeprefix(below) for file in data], subset, splits)
        chosen = [below + file for file in chosen]
    kinds = sorted({data_kind(file) or "" for file in chosen}, key=_PREFERRED.index)
    if len(kinds) > 1:
        chosen = [file for file in chosen if data_kind(file) == kinds[0]]
        reason += f"; its {', '.join(kinds[1:])} files are ignored, {kinds[0]} is preferred"
    return Chosen(tuple(sorted(chosen)), part, reason)


def is_data(file: str) -> bool:
    """Whether a file contains records, judged by its name: metadata files, READMEs and licenses do not."""
    name = file.rpartition("/")[2]
    letters = "".join(filter(str.isalpha, name.lower().partition(".")[0]))
    prose = data_kind(name) == ".txt" and letters in _PROSE
    return data_kind(name) is not None and name not in _METADATA and not prose


def _no_data(name: str, files: Collection[str], folder: str | None) -> InputError:
    if any(file == f"{name.rpartition('/')[2]}.py" for file in files):
        fix = "set revision: refs/convert/parquet, which the hub provides for many such data sets"
        return _refusal(name, "is built by a script, and surefoot does not run code of a data set", fix)
    where = "has no data file" if folder is None else f"has no data file in {folder}"
    return _refusal(name, where, f"surefoot reads {' '.join(DATA_KINDS)}")


def _configs(name: str, readme: str) -> list[Mapping[str, Any]]:
    """Return the `configs` of the README's YAML header that name data files."""
    header = read_header(name, readme)
    configs = header.get("configs") if isinstance(header, dict) else None
    listed = configs if isinstance(configs, list) else []
    whole = [one for one in listed if isinstance(one, dict) and one.get("config_name") and one.get("data_files")]
    return [one for one in whole if isinstance(one["config_name"], _SCALAR)]


def _declared(
    name: str, configs: Sequence[Mapping[str, Any]], data: Sequence[str], subset: str | None, wanted: Splits
) -> tuple[list[str], str, str]:
    by_name = {str(one["config_name"]): one for one in configs}
    if subset is None:
        default = [known for known, one in by_name.items() if one.get("default") is True or known == "default"]
        if not default and len(by_name) > 1:
            fix = f"set subset to one of {', '.join(by_name)}"
            raise _refusal(name, f"has {len(by_name)} subsets and no default", fix)
        subset = (default or list(by_name))[0]
    elif subset not in by_name:
        raise _refusal(name, f"has no subset {subset!r}", f"it has {', '.join(by_name)}")
    splits = _declared_splits(by_name[subset]["data_files"])
    split = next((one for one in wanted if one in splits), None)
    if split is None:
        raise _refusal(name, f"{_no_split(wanted)} in the subset {subset!r}", _other_splits(wanted, splits))
    chosen = matching(name, splits[split], data)
    if not chosen:
        what = f"its README names {', '.join(splits[split])} for the split {split!r}, but no data file matches"
        raise _refusal(name, what, "choose another split or revision")
    return chosen, f"subset {subset}, split {split}", "as its README declares"


def _declared_splits(data_files: Any) -> dict[str, list[str]]:
    """Return split -> patterns. Entries without a split are train."""
    listed = data_files if isinstance(data_files, list) else [data_files]
    splits: dict[str, list[str]] = {}
    for item in listed:
        split, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else ("train", item)
        named = [path for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, _SCALAR)]
        if isinstance(split, _SCALAR):
            splits.setdefault(str(split), []).extend(map(str, named))
    return splits


def _no_split(wanted: Splits) -> str:
    return f"has no split {' or '.join(map(repr, wanted))}"


def _other_splits(wanted: Splits, there: Iterable[str]) -> str:
    """Suggest a fix. Several splits are wanted only if the user named none."""
    listed = f"it has {', '.join(there)}"
    return listed if len(wanted) == 1 else f"{listed}; name the one you mean in split"


def _by_name(name: str, data: Sequence[str], subset: str | None, wanted: Splits) -> tuple[list[str], str, str]:
    subsets = sorted({_subset_of(file) for file in data})
    listed = ", ".join(subsets[:_LISTED]) + (" …" if len(subsets) > _LISTED else "")
    if subset is not None:
        inside = [file for file in data if file.startswith(f"{subset}/") or _subset_of(file) == subset]
        if not inside:
            fix = f"it has {'none' if subsets == [ROOT] else listed}"
            raise _refusal(name, f"has no subset {subset!r}", fix)
        data = inside
    elif len(subsets) > 1:
        root = f" ({ROOT} means the files outside these folders)" if ROOT in subsets else ""
        raise _refusal(name, f"has {len(subsets)} folders of data", f"set subset to one of {listed}{root}")
    shown = {file: _split_of(file) for file in data}
    unread = [file for file, seen in shown.items() if seen is None]
    rest = f"{', '.join(unread[:_LISTED])} {'show' if len(unread) > 1 else 'shows'} no split" if unread else ""
    if len(unread) == len(shown):
        shown, reason = dict.fromkeys(data, "train"), "no file name shows a split, so all are train"
        wanted = (*wanted, "train") if len(wanted) > 1 else wanted
    else:
        reason = "seen from the file names" + (f"; not read: {rest}" if rest else "")
    there = sorted({seen for seen in shown.values() if seen})
    split = next((one for one in wanted if one in there), None)
    if split is None:
        fix = _other_splits(wanted, there) + (f"; {rest}" if rest else "")
        raise _refusal(name, _no_split(wanted), fix)
    chosen = [file for file, seen in shown.items() if seen == split]
    return chosen, f"{'' if subset is None else f'subset {subset}, '}split {split}", reason


def _subset_of(path: str) -> str:
    """Return the folder of a file, without trailing folders named `data` or after a split."""
    folders = path.split("/")[:-1]
    while folders and (folders[-1] == "data" or folders[-1].lower().removeprefix("partial-") in _SPLITS):
        folders.pop()
    return "/".join(folders) or ROOT


def _split_of(path: str) -> str | None:
    """Return the split that a path shows: by its shard name, else by the last word that names a split."""
    *folders, file = path.split("/")
    stem = file.partition(".")[0]
    if shard := _SHARD.match(stem):
        return _SPLITS.get(shard[1], shard[1])
    return next((word for part in (stem, *reversed(folders)) if (word := _word_of(part))), None)


def _word_of(part: str) -> str | None:
    return next((_SPLITS[word] for word in re.split(r"[^a-z0-9]+", part.lower()) if word in _SPLITS), None)


MAX_CHARACTERS = 1 << 20
_LONGEST_NUMBER = 100  # characters; YAML 1.1 reads 1:1:1:1… as a number in base 60
_FENCE = "---"


def read_header(name: str, readme: str) -> Any:
    """Parse the README's YAML header; None if there is none.

    name: name of the repository.

    Raises InputError for a header that is too long, has aliases, or is not YAML.
    """
    lines = readme.split("\n")
    if lines[0].rstrip() != _FENCE:
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    if end is None:
        return None
    text, where = "\n".join(lines[1:end]), f"{name}/README.md"
    if len(text) > MAX_CHARACTERS:
        raise _refusal(where, f"its header is longer than {MAX_CHARACTERS:,} characters", _FIX)
    try:
        return yaml.load(text, _Loader)
    except _Alias as alias:
        raise _refusal(where, f"its header has the alias *{alias}, which is not supported", _FIX) from None
    except Exception:  # PyYAML's errors, and anything that its constructors raise (2024-99-99, `!!int ''`)
        raise _refusal(where, "its header is not YAML", _FIX) from None


_FIX = "download the files and use their paths"


class _Alias(Exception):
    """The header contains an alias."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses aliases, and numbers that take long to parse."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _Alias(self.peek_event().anchor)
        return super().compose_node(parent, index)

    def whole(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"a number of {len(node.value)} characters")
        return self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole)


MOST_WORK = 10**9  # characters of all patterns times characters of all paths: minutes in the worst case
_PIECE = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")


def matching(name: str, globs: Iterable[str], paths: Collection[str]) -> list[str]:
    """Return the paths that match any of the patterns, in order. `**/` matches any number of folders, `*` any text and
    `?` any character within one name.

    name: name of the repository.

    Raises InputError if there are too many patterns and paths.
    """
    exact, wild = set[str](), list[list[str]]()
    for glob in dict.fromkeys(one.removeprefix("./") for one in globs):
        if "*" in glob or "?" in glob:
            wild.append(_PIECE.findall(glob))
        else:
            exact.add(glob)
    work = sum(len(piece) for pieces in wild for piece in pieces) * sum(map(len, paths))
    if work > MOST_WORK:
        what = f"its README names {len(wild):,} patterns for {len(paths):,} files, which takes too long"
        raise _refusal(name, what, _FIX)
    return [path for path in paths if path in exact or any(matches(pieces, path) for pieces in wild)]


def matches(pieces: Iterable[str], path: str) -> bool:
    """Whether the whole path matches a pattern, given as its pieces."""
    reached = {0}
    for piece in pieces:
        reached = _reach(piece, path, reached)
        if not reached:
            return False
    return len(path) in reached


def _reach(piece: str, path: str, reached: set[int]) -> set[int]:
    """Return the positions in the path after matching a piece from any of the positions `reached`."""
    if piece == "*":
        ends = set[int]()
        for place in reached:
            if place not in ends:  # otherwise the rest of this name was added already
                end = path.find("/", place)
                ends.update(range(place, (len(path) if end < 0 else end) + 1))
        return ends
    if piece == "**":
        return set(range(min(reached), len(path) + 1))
    if piece == "**/":
        return reached | {place + 1 for place in range(min(reached), len(path)) if path[place] == "/"}
    if piece == "?":
        return {place + 1 for place in reached if path[place : place + 1] not in ("", "/")}
    return {place + len(piece) for place in reached if path.startswith(piece, place)}


def _refusal(where: str, what: str, fix: str = "") -> InputError:
    return InputError(Fault(where, what, fix, code="SF-DATA-HUB"))
