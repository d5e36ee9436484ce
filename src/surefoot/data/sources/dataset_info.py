"""Read dataset_info.json, LLaMA-Factory's description of data sets.

Two of its rules are easy to miss and also hold here: if `columns` is given, other columns are not read; if it is not
given, only the standard columns of the format are. In LLaMA-Factory, `num_samples` draws at random and repeats records
if it is larger than the data; here it draws by a hash of the content, the same records on every machine, and never
repeats. Source: data/README.md of hiyouga/LLaMA-Factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from surefoot.data.sources.records import Kind
from surefoot.data.sources.text import read_value
from surefoot.system.dataset_info import COLUMNS, FORMATS, OPENAI_TAGS, PAIR, VERDICT
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.locations import DESCRIPTION
from surefoot.system.messages import nearest_word, nearest_words

_KEYS = (
    "hf_hub_url",
    "file_name",
    "formatting",
    "columns",
    "tags",
    "subset",
    "split",
    "folder",
    "num_samples",
    "ranking",
)
_WITHOUT_EFFECT = ("file_sha1",)  # in old descriptions; surefoot records the SHA-256 itself
_NOT_READ = {
    "script_url": "is built by a script, and surefoot does not run code of a data set",
    "ms_hub_url": "is on ModelScope, which surefoot does not support",
    "om_hub_url": "is on Modelers, which surefoot does not support",
    "cloud_file_name": "is in a cloud bucket, which surefoot does not support",
}
_SOURCES = ("hf_hub_url", "file_name", *_NOT_READ)
_USUAL = {
    "alpaca": {"instruction": "instruction", "input": "input", "output": "output"},
    "sharegpt": {"conversations": "conversations"},
    "messages": {"messages": "messages"},
}
_MARKS = (*PAIR, *VERDICT)  # columns that mark an entry as preference data, like the key `ranking`
_MEDIA = ("videos", "audios")


@dataclass(frozen=True)
class Entry:
    """One entry of dataset_info.json.

    where: place for messages.
    file: path within the folder; None for a data set on the hub.
    hub: name on the hub; subset, split and folder refer to it.
    format: name of the record format.
    columns: the format's field name -> the file's field name; nothing else is read.
    tags: names of roles and turn fields in the file.
    sample: number of records to draw; None for all.
    mark: the key or column that marks preference data; empty for answers.
    """

    where: str
    file: str | None
    hub: str | None
    subset: str | None
    split: str
    folder: str | None
    format: str
    columns: Mapping[str, str]
    tags: Mapping[str, str]
    sample: int | None
    mark: str = ""

    @property
    def kind(self) -> Kind:
        if not self.mark:
            return "answers"
        return "judged" if self.mark in VERDICT else "pairs"


def read_description(folder: Path, name: str) -> dict[str, Mapping[str, Any]] | None:
    """Read the entries of the folder's dataset_info.json; None if there is none, or the file has another meaning (the
    `datasets` library writes a file of the same name about a single data set).

    name: the folder's name, for messages.
    """
    path = folder / DESCRIPTION
    try:
        if path.exists() and not path.is_file():  # reading a FIFO would block forever
            raise _refusal(f"{name}/{DESCRIPTION}", "is not a regular file", "replace it by the description")
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        raise _refusal(f"{name}/{DESCRIPTION}", "is not UTF-8", "save the file as UTF-8") from None
    except OSError as error:
        raise EnvironmentFault(
            Fault(f"{name}/{DESCRIPTION}", f"cannot be read: {error.strerror or error}", code="SF-FILE-UNREADABLE")
        ) from None
    entries = read_value(f"{name}/{DESCRIPTION}", text)
    described = isinstance(entries, dict) and all(
        isinstance(entry, dict) and any(key in entry for key in _SOURCES) for entry in entries.values()
    )
    return entries if described and entries else None


def read_entry(entries: Mapping[str, Mapping[str, Any]], name: str, folder: str) -> Entry:
    """Read and check the entry `name`.

    folder: the folder's name, for messages.

    Raises InputError for an unknown name, and for an entry that is malformed or needs unsupported features.
    """
    where = f"{folder}/{DESCRIPTION}"
    if name not in entries:
        near = nearest_words(name, entries, 2)
        fix = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(entries)}"
        raise _refusal(where, f"has no entry {name!r}", fix)
    entry, where = entries[name], f"{where} entry {name!r}"
    _check(entry, where)
    layout = FORMATS[entry.get("formatting", "alpaca")]
    columns = entry.get("columns")
    tags = dict(entry.get("tags", {}))
    if layout == "messages" and any(OPENAI_TAGS[tag] != word for tag, word in tags.items()):
        layout = "sharegpt"  # only sharegpt supports tags; the messages format has OpenAI's names
    elif layout == "messages":
        tags = {}
    mark = _mark(entry)
    if columns is None:
        renamed = {**_USUAL[layout], **(PAIR if mark else {})}
    else:
        fields = {**COLUMNS[layout], **PAIR, **VERDICT}
        renamed = {fields[ours]: own for ours, own in columns.items()}
    if mark:
        layout = "judged" if mark in VERDICT else "preference"
    return Entry(
        where=where,
        file=None if "hf_hub_url" in entry else entry["file_name"],
        hub=entry.get("hf_hub_url"),
        subset=entry.get("subset"),
        split=entry.get("split", "train"),
        folder=entry.get("folder"),
        format=layout,
        columns=renamed,
        tags=tags,
        sample=entry.get("num_samples"),
        mark=mark,
    )


def _mark(entry: Mapping[str, Any]) -> str:
    columns = entry.get("columns", {})
    return "ranking" if entry.get("ranking") else next((column for column in _MARKS if column in columns), "")


def _check(entry: Mapping[str, Any], where: str) -> None:
    _check_keys(entry, where)
    _check_types(entry, where)
    if "hf_hub_url" not in entry:
        for key, reason in _NOT_READ.items():
            if key in entry:
                raise _refusal(where, f"{reason} ({key})", "export it to a file and set file_name")
    columns = entry.get("columns", {})
    if media := [column for column in _MEDIA if column in columns]:
        raise _refusal(where, f"has {media[0]}, but surefoot only reads texts and pictures", "use another entry")
    known = COLUMNS[FORMATS[entry.get("formatting", "alpaca")]]
    if unknown := [column for column in columns if column not in (*known, *_MARKS)]:
        fix = f"its format reads {', '.join(known)}"
        raise _refusal(where, f"columns has the unknown key {unknown[0]!r}", fix)
    if "file_name" in entry and "hf_hub_url" not in entry:
        _check_file(entry, where)


def _check_keys(entry: Mapping[str, Any], where: str) -> None:
    known = (*_KEYS, *_NOT_READ, *_WITHOUT_EFFECT)
    if unknown := [key for key in entry if key not in known]:
        near = nearest_word(unknown[0], known)
        fix = f"did you mean {near}?" if near else f"known: {', '.join(_KEYS)}"
        raise _refusal(where, f"unknown: {', '.join(unknown)}", fix)


def _check_types(entry: Mapping[str, Any], where: str) -> None:
    def refuse(key: str, what: str) -> None:
        raise _refusal(where, f"{key} is {entry[key]!r}, not {what}")

    for key in ("hf_hub_url", "file_name", "subset", "split", "folder"):
        if key in entry and not (isinstance(entry[key], str) and entry[key]):
            refuse(key, "a text")
    if entry.get("formatting", "alpaca") not in tuple(FORMATS):  # a tuple, because the value may be unhashable
        refuse("formatting", f"one of {', '.join(FORMATS)}")
    for key, known in (("columns", None), ("tags", OPENAI_TAGS)):
        pairs = entry.get(key, {})
        if not isinstance(pairs, dict) or not all(isinstance(own, str) for own in pairs.values()):
            refuse(key, "an object of texts")
        if known and (unknown := [tag for tag in pairs if tag not in known]):
            raise _refusal(where, f"tags has {unknown[0]!r}", f"known: {', '.join(known)}")
    number = entry.get("num_samples", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        refuse("num_samples", "a number from 1")
    if not isinstance(entry.get("ranking", False), bool):
        refuse("ranking", "true or false")


def _check_file(entry: Mapping[str, Any], where: str) -> None:
    """Check that the file is inside the description's folder, since the description is untrusted; for links see
    `inside`."""
    file = entry["file_name"]
    parts = (*PurePosixPath(file).parts, *PureWindowsPath(file).parts)
    if PurePosixPath(file).is_absolute() or PureWindowsPath(file).anchor or ".." in parts:
        what = f"file_name {file} leaves the folder of the description"
        raise _refusal(where, what, "put the file into the folder, or give its path in data.train")
    for key in ("subset", "split", "folder"):
        if entry.get(key, "train" if key == "split" else None) not in (None, "train"):
            raise _refusal(where, f"{key} is for data sets on the hub, but this one is a file", "remove it")


def inside(folder: Path, entry: Entry) -> Path:
    """Return the path of an entry. Raises InputError if it, or a file in it, is a link that leads out of the folder."""
    path = folder / (entry.file or "")
    files = path.iterdir() if path.is_dir() else ()
    if not all(one.resolve().is_relative_to(folder.resolve()) for one in (path, *files)):
        what = f"file_name {entry.file} is, or contains, a link out of the folder of the description"
        raise _refusal(entry.where, what, "put the file into the folder, or give its path in data.train")
    return path


def _refusal(where: str, what: str, fix: str = "") -> InputError:
    return InputError(Fault(where, what, fix, code="SF-DATA-DESCRIPTION"))
