"""Checkpoints: staged, hashed, published by one rename; found again only if they verify.

A folder `checkpoint-N` holds the model as the ecosystem reads it (weights, config, tokenizer), `optimizer.safetensors`,
`state.json`, `trainer_state.json` and, written last, a manifest of all other files (`surefoot.training.manifest`). A
file that the manifest does not name makes a checkpoint suspect, for libraries read what they find. Nothing is pickled.
Cost: one read of what was just written, and another before older ones are deleted.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from surefoot.models.precision import is_finite
from surefoot.planning.disk import checkpoints_kept
from surefoot.system import durable, plain_files
from surefoot.system.errors import Diverged, EnvironmentFault, Fault, IntegrityError
from surefoot.system.folders import CHECKPOINT
from surefoot.training.engine import Engine
from surefoot.training.manifest import MANIFEST, FileCheck, check_against, damaged, manifest, read_manifest, unreadable
from surefoot.training.optimizer_state import FILE as OPTIMIZER
from surefoot.training.state import RunState

STAGE = "stage.safetensors"
STATE = "state.json"
TRAINER_STATE = "trainer_state.json"
_REJECTED = ".rejected-"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that verified when it was looked at."""

    folder: Path
    step: int


class Begun:
    """A checkpoint on its way.

    folder: hidden, for the model; None on all ranks but the first, which writes it.
    size: bytes of its files, once all are written.
    """

    def __init__(self, folder: Path | None):
        self.folder, self.size = folder, 0
        self._finish: Callable[[], Path] | None = None

    def finish(self) -> Path:
        """Hash, flush and commit it, in any thread; looks at no weights. Every rank must call it, after the block."""
        assert self._finish is not None, "the block has ended"
        return self._finish()


@contextmanager
def begin_checkpoint(
    run: Path,
    engine: Engine,
    state: RunState,
    *,
    trainer_state: Mapping[str, Any],
    identity: Mapping[str, Any],
    carried: Mapping[str, torch.Tensor] | None = None,
    frozen: bool = True,
) -> Iterator[Begun]:
    """Write checkpoint-<step> under `run` as far as the weights are needed. The block writes weights, config and
    tokenizer into its folder; optimizer and state follow. Every rank must enter, and finish.

    identity: hashes and versions that tell which run, data and environment this belongs to; kept in the manifest.
    carried: tensors that the stage carries from step to step.
    frozen: whether the block reads weights that do not train.

    Raises Diverged before anything is written when a parameter, moment or carried tensor is not finite on any rank.
    """
    tensors = engine.gather_state()  # a collective: before anything that one rank alone may refuse
    carried = carried or {}
    held = {**engine.weights(), **tensors, **carried}
    bad = [name for name, tensor in held.items() if not is_finite(tensor)]
    if engine.totals([len(bad)])[0]:
        what = f"{len(bad)} tensors are not finite, first {bad[0]}" if bad else "tensors of another rank are not finite"
        raise Diverged(Fault(f"step {state.step}", what, "the last checkpoint is untouched", code="SF-DIVERGED"))
    final = run / f"checkpoint-{state.step}"
    if engine.rank != 0:
        begun = Begun(None)
        with durable.faults_named(final), engine.gathered(frozen):
            yield begun

        def agree() -> Path:
            engine.totals([1.0])  # the first rank waits for this word
            return final

        begun._finish = agree
        return
    with ExitStack() as stack:
        staging = stack.enter_context(durable.staged_folder(final, replace=True))
        stack.enter_context(_disk_faults(final))
        begun = Begun(staging)
        with engine.gathered(frozen):
            yield begun
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / OPTIMIZER)
        if carried:
            save_file({name: tensor.contiguous() for name, tensor in carried.items()}, staging / STAGE)
        durable.fill_json(staging / STATE, state.to_json())
        durable.fill_json(staging / TRAINER_STATE, trainer_state)
        paths = sorted(staging.rglob("*"))
        begun.size = sum(path.stat().st_size for path in paths if path.is_file())
        # `commit` closes them; until then an error, or the end of the process, removes the folder.
        rest = stack.pop_all()

    def commit() -> Path:
        with rest:
            durable.fill_json(staging / MANIFEST, manifest(staging, paths, state.step, identity))
            # The rename that makes it a checkpoint comes after all ranks are done; one that failed never gets here.
            engine.totals([1.0])
        return final

    begun._finish = commit


def verify_checkpoint(folder: Path) -> list[Fault]:
    """Everything that is wrong with a checkpoint; empty when it can be trusted."""
    try:
        return [check.fault for check in check_checkpoint(folder) if check.fault]
    except IntegrityError as error:
        return list(error.faults)


def check_checkpoint(folder: Path) -> list[FileCheck]:
    """`check_files`; and of a folder with a checkpoint's name, whether it is that of its step, and files that its
    manifest does not know: those of a run folder are many. Hidden ones, as desktops leave them, do not count: no
    library reads them."""
    content = read_manifest(folder)
    checks = check_against(folder, content["files"])
    named = CHECKPOINT.fullmatch(folder.name)
    if named is None:
        return checks
    if int(named[1]) != content["step"]:
        raise IntegrityError(damaged(folder, f"holds step {content['step']}: the folder was renamed"))
    there = (path for path in sorted(folder.rglob("*")) if not path.is_dir() and not path.name.startswith("."))
    surplus = [
        FileCheck(name, path.lstat().st_size, "", damaged(path, "is not of this checkpoint: it was added later"))
        for path in there
        if (name := path.relative_to(folder).as_posix()) not in content["files"] and name != MANIFEST
    ]
    return checks + surplus


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """All finished checkpoint folders under `run`, newest first, unverified. Staging folders do not match."""
    found = [
        Checkpoint(path, int(match[1]))
        for path in (run.iterdir() if run.is_dir() else ())
        if (match := CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_verified(
    run: Path, wanted: Callable[[Checkpoint], bool] = lambda checkpoint: True
) -> tuple[Checkpoint | None, list[Fault]]:
    """The newest checkpoint that verifies, and what was wrong with the newer ones.

    wanted: others that verify are passed over in silence.

    None when there is no checkpoint, or none that is wanted; IntegrityError when some do not verify and none is left.
    """
    rejected: list[Fault] = []
    for checkpoint in list_checkpoints(run):
        faults = verify_checkpoint(checkpoint.folder)
        if not faults and wanted(checkpoint):
            return checkpoint, rejected
        rejected += faults
    if rejected:
        fix = "start from step 0 with --overwrite"
        raise IntegrityError([*rejected, Fault(str(run), "no checkpoint verifies", fix, code="SF-CHECKPOINT-NONE")])
    return None, rejected


def read_state(checkpoint: Checkpoint) -> RunState:
    """The run state alone; reads no tensor. Raises IntegrityError where it is none."""
    path = checkpoint.folder / STATE
    try:
        return RunState.from_json(json.loads(plain_files.read_text(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(unreadable(path, error)) from None


def load_state(checkpoint: Checkpoint) -> tuple[RunState, dict[str, torch.Tensor]]:
    """Run state and optimizer tensors (on the CPU)."""
    return read_state(checkpoint), load_file(checkpoint.folder / OPTIMIZER)


def load_carried(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors that the stage carried (on the CPU); none where it carried none."""
    path = checkpoint.folder / STAGE
    return load_file(path) if path.is_file() else {}


def retain(run: Path, keep: int, best_step: int | None) -> None:
    """Delete all but the newest `keep` checkpoints (`planning.disk.LEAST_KEPT` at least), the best one, the newest that
    verifies and the newest healthy one that does. Called only after a newer one is safe. Reads the newest, and older
    ones for as long as none verifies or is healthy: damage of those that stay must not cost the last good one."""
    found = list_checkpoints(run)
    old = found[checkpoints_kept(keep) :]
    if not old:
        return
    verifies = cache(lambda checkpoint: not verify_checkpoint(checkpoint.folder))
    sound = next((one.step for one in found if verifies(one)), None)
    healthy = next((one.step for one in found if _is_healthy(one) and verifies(one)), None)
    for checkpoint in old:
        if checkpoint.step not in (best_step, sound, healthy):
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
    """safetensors reports what the disk refuses as an error of its own kind, with the system's number in its text."""
    try:
        yield
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        full = number is not None and int(number[1]) in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space; the last checkpoint is untouched"
        code = "SF-DISK-FULL" if full else "SF-FILE-WRITE"
        raise EnvironmentFault(Fault(str(folder), f"cannot be written: {error}", fix, code=code)) from error
