"""Checkpoints: written to a staging folder, hashed, published by one rename, and used only if they verify.

A folder `checkpoint-N` holds the model in Hugging Face layout (weights, config, tokenizer), `optimizer.safetensors`,
`state.json`, `trainer_state.json` and, written last, a manifest of all other files (`surefoot.training.manifest`). A
file that the manifest does not list fails verification, because libraries load whatever files they find. Nothing is
pickled. Cost: the files are read once to hash them, and once more before older checkpoints are deleted.
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
    """A checkpoint folder and its step."""

    folder: Path
    step: int


class PendingCheckpoint:
    """A checkpoint that is being written.

    folder: staging folder, into which the caller writes the model; None except on rank 0, which writes it.
    size: bytes of its files, once all are written.
    """

    def __init__(self, folder: Path | None):
        self.folder, self.size = folder, 0
        self._finish: Callable[[], Path] | None = None

    def finish(self) -> Path:
        """Hash, flush and commit the files; callable from any thread, needs no weights. Collective: every rank must
        call it after the block of `begin_checkpoint`. Returns the checkpoint's folder."""
        assert self._finish is not None, "the block must have ended"
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
) -> Iterator[PendingCheckpoint]:
    """Write the files of checkpoint-<step> under `run`, to be committed with `PendingCheckpoint.finish`. The block
    writes weights, config and tokenizer into its folder; optimizer and state are added when the block ends. Collective:
    every rank must enter and finish.

    identity: hashes and versions of the run, its data and environment; stored in the manifest.
    carried: tensors that the method carries from step to step.
    frozen: whether the block reads frozen weights.

    Raises Diverged, before anything is written, if a parameter, moment or carried tensor is not finite on any rank.
    """
    tensors = engine.gather_state()  # a collective, so it comes before any error that one rank alone may raise
    carried = carried or {}
    saved = {**engine.weights(), **tensors, **carried}
    bad = [name for name, tensor in saved.items() if not is_finite(tensor)]
    # Summed over the ranks, so that all raise or none: a rank that went on would wait in the next collective.
    if engine.totals([len(bad)])[0]:
        what = f"{len(bad)} tensors are not finite, first {bad[0]}" if bad else "tensors on another rank are not finite"
        raise Diverged(Fault(f"step {state.step}", what, "the last checkpoint is untouched", code="SF-DIVERGED"))
    final = run / f"checkpoint-{state.step}"
    if engine.rank != 0:
        pending = PendingCheckpoint(None)
        with durable.faults_named(final), engine.gathered(frozen):
            yield pending

        def agree() -> Path:
            engine.totals([1.0])  # rank 0 waits for this before it commits
            return final

        pending._finish = agree
        return
    with ExitStack() as stack:
        staging = stack.enter_context(durable.staged_folder(final, replace=True))
        stack.enter_context(_disk_faults(final))
        pending = PendingCheckpoint(staging)
        with engine.gathered(frozen):
            yield pending
        # safetensors writes contiguous memory only.
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / OPTIMIZER)
        if carried:
            save_file({name: tensor.contiguous() for name, tensor in carried.items()}, staging / STAGE)
        durable.fill_json(staging / STATE, state.to_json())
        durable.fill_json(staging / TRAINER_STATE, trainer_state)
        paths = sorted(staging.rglob("*"))
        pending.size = sum(path.stat().st_size for path in paths if path.is_file())
        # `commit` closes these contexts; until then an error, or the end of the process, removes the staging folder.
        rest = stack.pop_all()

    def commit() -> Path:
        with rest:
            durable.fill_json(staging / MANIFEST, manifest(staging, paths, state.step, identity))
            # Wait for all ranks before the rename that makes it a checkpoint; a failed rank never gets here.
            engine.totals([1.0])
        return final

    pending._finish = commit


def verify_checkpoint(folder: Path) -> list[Fault]:
    """Return everything that is wrong with a checkpoint; empty if it verifies."""
    try:
        return [check.fault for check in check_checkpoint(folder) if check.fault]
    except IntegrityError as error:
        return list(error.faults)


def check_checkpoint(folder: Path) -> list[FileCheck]:
    """Check the files of a folder against its manifest. For a folder named checkpoint-N, also check that N is its step
    and report files that the manifest does not list (a run folder has many), except hidden ones, which desktops create
    and no library reads."""
    content = read_manifest(folder)
    checks = check_against(folder, content["files"])
    named = CHECKPOINT.fullmatch(folder.name)
    if named is None:
        return checks
    if int(named[1]) != content["step"]:
        raise IntegrityError(damaged(folder, f"contains step {content['step']}: the folder was renamed"))
    present = (path for path in sorted(folder.rglob("*")) if not path.is_dir() and not path.name.startswith("."))
    # lstat: a link may lead nowhere.
    surplus = [
        FileCheck(
            name, path.lstat().st_size, "", damaged(path, "does not belong to this checkpoint: it was added later")
        )
        for path in present
        if (name := path.relative_to(folder).as_posix()) not in content["files"] and name != MANIFEST
    ]
    return checks + surplus


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """List the finished checkpoint folders under `run`, newest first, without verifying them."""
    found = [
        Checkpoint(path, int(match[1]))
        for path in (run.iterdir() if run.is_dir() else ())
        if (match := CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_verified(
    run: Path, wanted: Callable[[Checkpoint], bool] = lambda checkpoint: True
) -> tuple[Checkpoint | None, list[Fault]]:
    """Return the newest checkpoint that verifies, and what is wrong with the newer ones.

    wanted: filter; checkpoints that verify but are not wanted are skipped without a message.

    The checkpoint is None if there is none, or none that is wanted. Raises IntegrityError if some do not verify and no
    other is left.
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
    """Read the run state alone, without tensors. Raises IntegrityError if the file is not a valid state."""
    path = checkpoint.folder / STATE
    try:
        return RunState.from_json(json.loads(plain_files.read_text(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(unreadable(path, error)) from None


def load_state(checkpoint: Checkpoint) -> tuple[RunState, dict[str, torch.Tensor]]:
    """Return the run state and the optimizer tensors (on the CPU)."""
    return read_state(checkpoint), load_file(checkpoint.folder / OPTIMIZER)


def load_carried(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors that the method carried between steps (on the CPU); empty if there are none."""
    path = checkpoint.folder / STAGE
    return load_file(path) if path.is_file() else {}


def retain(run: Path, keep: int, best_step: int | None) -> None:
    """Delete old checkpoints. Kept are the newest `keep` (at least `planning.disk.LEAST_KEPT`), the best one, the
    newest that verifies, and the newest that verifies and is healthy. Call it only after a newer one is complete. It
    reads checkpoints from the newest on until one verifies and one is healthy, so that a damaged one is never kept in
    place of the last good one."""
    found = list_checkpoints(run)
    old = found[checkpoints_kept(keep) :]
    if not old:
        return
    verifies = cache(lambda checkpoint: not verify_checkpoint(checkpoint.folder))
    sound = next((one.step for one in found if verifies(one)), None)
    # In this order: the state is a small file, but verifying hashes all of them.
    healthy = next((one.step for one in found if _is_healthy(one) and verifies(one)), None)
    for checkpoint in old:
        if checkpoint.step not in (best_step, sound, healthy):
            durable.remove(checkpoint.folder)  # atomic: renamed first, so never seen half deleted


def _is_healthy(checkpoint: Checkpoint) -> bool:
    try:
        return read_state(checkpoint).is_healthy
    except IntegrityError:
        return False


def set_aside_newer(run: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, which did not verify; return their new paths, newest first.

    Otherwise, when the run continues from `step`, retention would count them among the newest and delete good ones.
    """
    aside = []
    for checkpoint in list_checkpoints(run):
        if checkpoint.step > step:
            path = run / f"{_REJECTED}{checkpoint.folder.name}"
            durable.move(checkpoint.folder, path)
            aside.append(path)
    return aside


def clear_rejected(run: Path) -> None:
    """Remove the checkpoints that `set_aside_newer` renamed."""
    for path in run.glob(f"{_REJECTED}checkpoint-*"):
        durable.remove(path)


@contextmanager
def _disk_faults(folder: Path) -> Iterator[None]:
    """Convert disk errors of safetensors, which raises its own type with the errno in the text, to EnvironmentFault."""
    try:
        yield
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        full = number is not None and int(number[1]) in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space; the last checkpoint is untouched"
        code = "SF-DISK-FULL" if full else "SF-FILE-WRITE"
        raise EnvironmentFault(Fault(str(folder), f"cannot be written: {error}", fix, code=code)) from error
