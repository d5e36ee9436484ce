"""Checkpoints: staged, hashed, published by one rename; found again only if they verify.

A folder `checkpoint-N` holds the model as the ecosystem reads it (weights, config, tokenizer), `optimizer.safetensors`,
`state.json`, `trainer_state.json` and, written last, `MANIFEST.json` with the size and SHA-256 of every other file, and
of itself. safetensors loads flipped bits without complaint, so the hashes are what makes a checkpoint trustworthy; a
file that the manifest does not name makes it suspect, for libraries read what they find. Nothing is pickled. Cost: one
read of what was just written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from surefoot import durable
from surefoot.errors import Diverged, EnvironmentFault, Fault, IntegrityError
from surefoot.training.engine import Engine
from surefoot.training.state import RunState

SCHEMA = 2
_WITHOUT_DIGEST = 1  # the schema before: its manifests say nothing of themselves
MANIFEST = "MANIFEST.json"
OPTIMIZER = "optimizer.safetensors"
STAGE = "stage.safetensors"
STATE = "state.json"
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_DIGEST = "sha256"
_REJECTED = ".rejected-"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that verified when it was looked at."""

    folder: Path
    step: int


def save_checkpoint(
    run: Path,
    engine: Engine,
    state: RunState,
    *,
    write_model: Callable[[Path], None],
    trainer_state: Mapping[str, Any],
    identity: Mapping[str, Any],
    carried: Mapping[str, torch.Tensor] | None = None,
    frozen: bool = True,
) -> Path:
    """Write checkpoint-<step> under `run` and return its folder, on the disk. Every rank must ask; the first one
    writes, and commits once all have done their part. Arguments and errors: see `begin_checkpoint`."""
    begun = begin_checkpoint(
        run,
        engine,
        state,
        write_model=write_model,
        trainer_state=trainer_state,
        identity=identity,
        carried=carried,
        frozen=frozen,
    )
    return begun.finish()


@dataclass(frozen=True)
class Begun:
    """A checkpoint whose files are written and not yet flushed, under a hidden name. size: bytes of them. finish:
    hashes, flushes and commits it, in any thread; it looks at no weights."""

    size: int
    finish: Callable[[], Path]


def begin_checkpoint(
    run: Path,
    engine: Engine,
    state: RunState,
    *,
    write_model: Callable[[Path], None],
    trainer_state: Mapping[str, Any],
    identity: Mapping[str, Any],
    carried: Mapping[str, torch.Tensor] | None = None,
    frozen: bool = True,
) -> Begun:
    """Write checkpoint-<step> under `run` as far as the weights are needed. Every rank must ask, and finish.

    write_model: writes weights, config and tokenizer into a folder. identity: hashes and versions that tell which run,
    data and environment this belongs to; kept in the manifest. carried: tensors that the stage carries from step to
    step. frozen: whether `write_model` reads weights that do not train. Raises Diverged before anything is written when
    a parameter, moment or carried tensor is not finite on any rank.
    """
    tensors = engine.gather_state()
    carried = carried or {}
    bad = _not_finite({**engine.weights(), **tensors, **carried})
    if engine.totals([len(bad)])[0]:
        what = f"{len(bad)} tensors are not finite, first {bad[0]}" if bad else "tensors of another rank are not finite"
        raise Diverged(Fault(f"step {state.step}", what, "the last checkpoint is untouched"))
    final = run / f"checkpoint-{state.step}"
    if engine.rank != 0:
        with durable.faults_named(final), engine.gathered(frozen):
            pass

        def agree() -> Path:
            engine.totals([1.0])  # the first rank waits for this word
            return final

        return Begun(0, agree)
    with ExitStack() as stack:
        staging = stack.enter_context(durable.staged_folder(final, replace=True))
        stack.enter_context(_disk_faults(final))
        with engine.gathered(frozen):
            write_model(staging)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / OPTIMIZER)
        if carried:
            save_file({name: tensor.contiguous() for name, tensor in carried.items()}, staging / STAGE)
        durable.fill_json(staging / STATE, state.to_json())
        durable.fill_json(staging / TRAINER_STATE, trainer_state)
        paths = sorted(staging.rglob("*"))
        size = sum(path.stat().st_size for path in paths if path.is_file())
        rest = stack.pop_all()

    def finish() -> Path:
        with rest:
            durable.fill_json(staging / MANIFEST, manifest(staging, paths, state.step, identity))
            engine.totals([1.0])  # a rank that failed has ended the run before it says this
        return final

    return Begun(size, finish)


def manifest(folder: Path, paths: Sequence[Path], step: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and hashes of the files among `paths`, which lie in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": durable.sha256_file(path)}
        for path in paths
        if path.is_file()
    }
    return sealed({"schema": SCHEMA, "step": step, "identity": identity, "files": files})


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the SHA-256 of all else in it, as it is written."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    return {**rest, _DIGEST: hashlib.sha256(durable.json_text(rest).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; IntegrityError when it is missing, torn, changed or of another schema."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        schema = content["schema"]
    except FileNotFoundError:
        raise IntegrityError(Fault(str(path), "is missing: this checkpoint was never finished")) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(Fault(str(path), f"cannot be read ({error})")) from None
    if schema not in (SCHEMA, _WITHOUT_DIGEST):
        raise IntegrityError(Fault(str(path), f"has schema {schema}; this version of surefoot reads {SCHEMA}"))
    if not _is_whole(content):
        raise IntegrityError(Fault(str(path), "lacks what a manifest has, or names files outside its folder"))
    if schema == SCHEMA and (text != durable.json_text(content) or sealed(content) != content):
        raise IntegrityError(Fault(str(path), "has another content than was written (SHA-256 differs)"))
    if schema == _WITHOUT_DIGEST and _DIGEST in content:
        raise IntegrityError(Fault(str(path), f"has another content than was written: its schema was {SCHEMA}"))
    return content


def _is_whole(content: Any) -> bool:
    """Of the right form, with names of files below its folder."""
    match content:
        case {"step": int(), "identity": dict(), "files": dict(files)}:
            return all(_is_entry(name, entry) for name, entry in files.items())
    return False


def _is_entry(name: str, entry: Any) -> bool:
    match entry:
        case {"size": int(), "sha256": str()}:
            path = PurePosixPath(name)
            return not path.is_absolute() and ".." not in path.parts
    return False


@dataclass(frozen=True)
class FileCheck:
    """One file of a manifest. fault: what is wrong with it, None when every byte is as it was written."""

    name: str
    size: int
    sha256: str
    fault: Fault | None


def check_files(folder: Path, hashed_up_to: int | None = None) -> list[FileCheck]:
    """Hash every file that the folder's manifest names. IntegrityError when the manifest itself cannot be used.

    hashed_up_to: of files with more bytes only the size is looked at.
    """
    return check_against(folder, read_manifest(folder)["files"], hashed_up_to)


def check_against(
    folder: Path, files: Mapping[str, Mapping[str, Any]], hashed_up_to: int | None = None
) -> list[FileCheck]:
    """files: name -> `size` in bytes and `sha256`, as they were written. hashed_up_to: as in `check_files`."""
    return [
        FileCheck(name, expected["size"], expected["sha256"], _file_fault(folder / name, expected, hashed_up_to))
        for name, expected in files.items()
    ]


def _file_fault(path: Path, expected: Mapping[str, Any], hashed_up_to: int | None) -> Fault | None:
    if not path.is_file():
        return Fault(str(path), "is missing")
    if path.stat().st_size != expected["size"]:
        return Fault(str(path), f"has {path.stat().st_size} bytes, not {expected['size']}")
    hashed = hashed_up_to is None or expected["size"] <= hashed_up_to
    if hashed and durable.sha256_file(path) != expected["sha256"]:
        return Fault(str(path), "has another content than was written (SHA-256 differs)")
    return None


def verify_checkpoint(folder: Path) -> list[Fault]:
    """Everything that is wrong with a checkpoint; empty when it can be trusted."""
    try:
        return [check.fault for check in check_checkpoint(folder) if check.fault]
    except IntegrityError as error:
        return list(error.faults)


def check_checkpoint(folder: Path) -> list[FileCheck]:
    """`check_files`; and of a folder with a checkpoint's name, whether it is that of its step, and files that its
    manifest does not know: those of a run folder are many. Hidden ones, as desktops leave them, are nobody's: no
    library reads them."""
    content = read_manifest(folder)
    checks = check_against(folder, content["files"])
    named = _NAME.fullmatch(folder.name)
    if named is None:
        return checks
    if int(named[1]) != content["step"]:
        raise IntegrityError(Fault(str(folder), f"holds step {content['step']}: the folder was renamed"))
    there = (path for path in sorted(folder.rglob("*")) if not path.is_dir() and not path.name.startswith("."))
    surplus = [
        FileCheck(name, path.lstat().st_size, "", Fault(str(path), "is not of this checkpoint: it was added later"))
        for path in there
        if (name := path.relative_to(folder).as_posix()) not in content["files"] and name != MANIFEST
    ]
    return checks + surplus


def is_checkpoint(folder: Path) -> bool:
    """By its name."""
    return folder.name.startswith("checkpoint-")


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """All finished checkpoint folders under `run`, newest first, unverified. Staging folders do not match."""
    found = [
        Checkpoint(path, int(match[1]))
        for path in (run.iterdir() if run.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_verified(
    run: Path, wanted: Callable[[Checkpoint], bool] = lambda checkpoint: True
) -> tuple[Checkpoint | None, list[Fault]]:
    """The newest checkpoint that verifies, and what was wrong with the newer ones. wanted: others that verify are
    passed over in silence.

    None when there is no checkpoint, or none that is wanted; IntegrityError when some do not verify and none is left.
    """
    rejected: list[Fault] = []
    for checkpoint in list_checkpoints(run):
        faults = verify_checkpoint(checkpoint.folder)
        if not faults and wanted(checkpoint):
            return checkpoint, rejected
        rejected += faults
    if rejected:
        raise IntegrityError([*rejected, Fault(str(run), "no checkpoint verifies", "start anew with --overwrite")])
    return None, rejected


def read_state(checkpoint: Checkpoint) -> RunState:
    """The run state alone; reads no tensor. Raises IntegrityError where it is none."""
    path = checkpoint.folder / STATE
    try:
        return RunState.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(Fault(str(path), f"cannot be read ({type(error).__name__}: {error})")) from None


def load_state(checkpoint: Checkpoint) -> tuple[RunState, dict[str, torch.Tensor]]:
    """Run state and optimizer tensors (on the CPU)."""
    return read_state(checkpoint), load_file(checkpoint.folder / OPTIMIZER)


def load_carried(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors that the stage carried (on the CPU); none where it carried none."""
    path = checkpoint.folder / STAGE
    return load_file(path) if path.is_file() else {}


def retain(run: Path, keep: int, best_step: int | None) -> None:
    """Delete all but the newest `keep` checkpoints, the best one and the newest healthy one. Called only after a newer
    one is safe."""
    found = list_checkpoints(run)
    if len(found) <= keep:
        return
    healthy = next((one.step for one in found if _is_healthy(one)), None)
    for checkpoint in found[keep:]:
        if checkpoint.step not in (best_step, healthy):
            durable.remove(checkpoint.folder)  # at once no longer a checkpoint


def _is_healthy(checkpoint: Checkpoint) -> bool:
    try:
        return read_state(checkpoint).is_healthy
    except IntegrityError:
        return False


def set_aside_newer(run: Path, step: int) -> list[Path]:
    """Take the checkpoints after `step` out of the row; returns where they are now, newest first.

    A run that goes on from `step` leaves them behind: they did not verify. If they stayed, retention would count
    them among the newest and delete good ones.
    """
    aside = []
    for checkpoint in list_checkpoints(run):
        if checkpoint.step > step:
            path = run / f"{_REJECTED}{checkpoint.folder.name}"
            durable.move(checkpoint.folder, path)
            aside.append(path)
    return aside


def clear_rejected(run: Path) -> None:
    """Remove what `set_aside_newer` kept for inspection."""
    for path in run.glob(f"{_REJECTED}checkpoint-*"):
        durable.remove(path)


@contextmanager
def _disk_faults(folder: Path) -> Iterator[None]:
    """safetensors reports a full disk as an error of its own kind."""
    try:
        yield
    except SafetensorError as error:
        what = f"cannot be written: {error}"
        raise EnvironmentFault(Fault(str(folder), what, "free some space; the last checkpoint is untouched")) from error


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.numel() and not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the smallest and the largest number, which are NaN where any is: no second tensor, a fraction of the time."""
    if not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
