"""Damage to a checkpoint, drawn at random: of one file's bytes, of which files there are, of what the manifest says."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults.histories import loaded, save
from faults.trials import Trial
from surefoot.system.durable import json_text
from surefoot.training.manifest import MANIFEST

BLOCK = 64  # bytes, at most, that are zeroed or exchanged


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def _zero(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    full = [place for place, byte in enumerate(data) if byte]
    first = draw.choice(full)  # a block of zeros stays the same
    data[first : first + BLOCK] = bytes(len(data[first : first + BLOCK]))
    path.write_bytes(data)


def _grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, BLOCK)))


def _delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def _add(path: Path, draw: random.Random) -> None:
    """A name that a library would read, or any other."""
    name = draw.choice(["adapter_model.safetensors", "model.safetensors.index.json", "tokenizer.json", "x"])
    there = path.with_name(name)
    there.write_bytes(draw.randbytes(draw.randint(0, BLOCK)))


def _into_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _of_the_older(path: Path, draw: random.Random) -> None:
    """Restored from the wrong checkpoint."""
    newer = _checkpoint(path)
    older = newer.with_name("checkpoint-1")
    differing = [one for one in _files(older) if one.read_bytes() != (newer / one.relative_to(older)).read_bytes()]
    chosen = draw.choice(differing)
    shutil.copy(chosen, newer / chosen.relative_to(older))


def _two_files(path: Path, draw: random.Random) -> None:
    """Their names exchanged."""
    others = [one for one in _files(_checkpoint(path)) if one.read_bytes() != path.read_bytes()]
    other = draw.choice(others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def _manifest(path: Path, draw: random.Random) -> None:
    """One value, one key, or one entry less; written as surefoot writes it."""
    newer = _checkpoint(path)
    content = json.loads((newer / MANIFEST).read_text())
    kind = draw.choice(["step", "schema", "identity", "size", "hash", "entry", "key", "more"])
    name = draw.choice(sorted(content["files"]))
    if kind == "step":
        content["step"] += draw.choice([-1, 1, 10])
    elif kind == "schema":
        content["schema"] += draw.choice([-1, 1])
    elif kind == "identity":
        content["identity"] = {"data": "e"}
    elif kind == "size":
        content["files"][name]["size"] += draw.choice([-1, 1])
    elif kind == "hash":
        digest = content["files"][name]["sha256"]
        content["files"][name]["sha256"] = digest[1:] + digest[0]
    elif kind == "entry":
        del content["files"][name]
    elif kind == "key":
        del content[draw.choice(sorted(content))]
    else:
        content[draw.choice(["version", "sha512"])] = 1
    (newer / MANIFEST).write_text(json_text(content))


def _renamed(path: Path, draw: random.Random) -> None:
    """Two folders with each other's names: neither is what it says."""
    newer = _checkpoint(path)
    newer.rename(newer.with_name(f"checkpoint-{draw.randint(3, 99)}"))


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "a flipped bit": _flip,
    "a cut": _cut,
    "a block of zeros": _zero,
    "more bytes": _grow,
    "a file less": _delete,
    "a file more": _add,
    "a folder for a file": _into_folder,
    "a file of the older one": _of_the_older,
    "two files exchanged": _two_files,
    "an edited manifest": _manifest,
    "another step's name": _renamed,
}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checkpoint(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))


def mutate_once(trial: Trial) -> str:
    """Two checkpoints, the newer damaged in one way; returns "" where the older one is loaded, else what was."""
    draw, run = trial.draw, trial.folder
    run.mkdir()
    for step in (1, 2):
        save(run, step)
    chosen = draw.choice(_files(run / "checkpoint-2"))
    what = draw.choice(sorted(MUTATIONS))
    MUTATIONS[what](chosen, draw)
    try:
        found = loaded(run)
    except Exception as error:  # a traceback is no detection
        return f"{what} in {chosen.name}: {type(error).__name__}: {error}"
    return "" if found == (1, 0) else f"{what} in {chosen.name} was not found: {found} was loaded"
