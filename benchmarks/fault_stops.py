"""Faults of stopping, saving and going on, a function each. For `faults_elsewhere.py`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fault_rows import flip, halved, make_table, payload
from fault_trial import WEIGHTS, Trial

DISK = 24  # MiB of the disk that fills up; a whole run takes 8
STOPS, row = make_table()
NAMED = "refused, named"
SAME = "goes on, same end"
OLDER = "named, the older checkpoint taken, same end"
_REASON = r"(damaged|verif|valid|missing|no such file|hash|SHA|has \d+ bytes)"


def _blamed(checkpoint: str) -> str:
    """A line that says what is wrong with it: that it was saved, or is gone on from, is no word about the fault."""
    return rf"{checkpoint}\b.*{_REASON}|{_REASON}.*{checkpoint}\b"


FOURTH, SECOND = _blamed("checkpoint-4"), _blamed("checkpoint-2")

# --- stopping --------------------------------------------------------------------------------------------------------


@row("SIGKILL in step 6, resumed", SAME)
def killed(trial: Trial) -> None:
    trial.resumable()
    trial.train(resume=True)


@row("SIGKILL in the middle of a save, resumed", "older checkpoint taken, same end", FOURTH)
def killed_in_save(trial: Trial) -> None:
    trial.train(at="open", name=trial.side.files["last"], do="kill")
    trial.train(resume=True)


@row("SIGTERM after step 3, resumed", "step 3 saved, exit 75, same end")
def stopped(trial: Trial) -> None:
    trial.train(at="step", n=3, do="stop")
    saved = sorted(path.name for path in (trial.folder / "out").glob("checkpoint-*"))
    trial.note = f"saved: {', '.join(saved)}"
    trial.train(resume=True)


@row("resumed where there is no checkpoint yet", "starts, says so, same end", r"no (valid )?checkpoint")
def nothing_saved(trial: Trial) -> None:
    trial.train(resume=True)


@row("the disk is full during a save", "exit 3, older checkpoint intact", r"no space left|disk is full|ENOSPC")
def full(trial: Trial) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "none", trial.folder]).returncode:
        trial.note = "not run: no right to mount a small disk"
        return
    try:
        shutil.copytree(trial.start, trial.folder, dirs_exist_ok=True)
        trial.train(at="mkdir", do="fill")
        (trial.folder / "filler").unlink(missing_ok=True)
        trial.note = _left(trial)
        trial.train(resume=True)
        weights = trial.folder / WEIGHTS
        kept = weights.read_bytes() if weights.exists() else None
    finally:
        subprocess.run(["umount", trial.folder], check=True)
    if kept:
        (trial.folder / WEIGHTS).parent.mkdir()
        (trial.folder / WEIGHTS).write_bytes(kept)


@row(
    "two runs in one folder at a time",
    "the second is refused, process named",
    r"in use|another process|locked|already|not empty",
)
def two(trial: Trial) -> None:
    trial.train(beside=True)


@row("a run is there already, no flag", "refused, nothing touched", r"not empty|already|exists|holds a run")
def occupied(trial: Trial) -> None:
    trial.resumable()
    before = _content(trial)
    trial.train()
    trial.note = "nothing touched" if _content(trial) == before else "went on in it"


# --- damage to what a resumed run starts from ------------------------------------------------------------------------


@row("newest checkpoint: weights cut in half", OLDER, FOURTH)
def cut_weights(trial: Trial) -> None:
    _damaged(trial, "weights", halved)


@row("newest checkpoint: one bit of the weights flipped", OLDER, r"checkpoint-4.*(SHA|hash|damaged|verif)")
def flipped_weights(trial: Trial) -> None:
    _damaged(trial, "weights", lambda path: flip(path, -1002))


@row("newest checkpoint: weights missing", OLDER, FOURTH)
def no_weights(trial: Trial) -> None:
    _damaged(trial, "weights", Path.unlink)


@row("newest checkpoint: optimizer state cut in half", OLDER, FOURTH)
def cut_optimizer(trial: Trial) -> None:
    _damaged(trial, "optimizer", halved)


@row("newest checkpoint: one bit of the optimizer state flipped", OLDER, r"checkpoint-4.*(SHA|hash|damaged|verif)")
def flipped_optimizer(trial: Trial) -> None:
    _damaged(trial, "optimizer", lambda path: flip(path, path.stat().st_size // 2 - path.stat().st_size))


@row("newest checkpoint: optimizer state missing", OLDER, r"checkpoint-4.*optimizer|optimizer.*missing")
def no_optimizer(trial: Trial) -> None:
    _damaged(trial, "optimizer", Path.unlink)


@row("newest checkpoint: state of the random numbers missing", OLDER, r"checkpoint-4.*state|RNG|rng_state")
def no_random(trial: Trial) -> None:
    _damaged(trial, "random", Path.unlink)


@row("newest checkpoint: run state cut in half", OLDER, FOURTH)
def cut_state(trial: Trial) -> None:
    _damaged(trial, "state", halved)


@row(
    "newest checkpoint: a pickle with a payload for optimizer state",
    "nothing run",
    FOURTH + r"|pickle|weights_only",
)
def pickled_state(trial: Trial) -> None:
    _damaged(trial, "optimizer", lambda path: path.write_bytes(payload(trial)))


@row("every checkpoint damaged", "exit 4, named", FOURTH, SECOND)
def all_damaged(trial: Trial) -> None:
    trial.resumable()
    for path in (trial.folder / "out").glob(f"checkpoint-*/{trial.side.files['weights']}"):
        halved(path)
    trial.train(resume=True)


@row(
    "resumed with other answers in the data",
    NAMED,
    r"train\.jsonl|training data|dataset",
    r"changed|another|other|differ",
)
def other_data(trial: Trial) -> None:
    trial.resumable()
    for number in range(1, 13):
        trial.row(number, output="something else")
    trial.train(resume=True)


@row("resumed with another batch size", NAMED, r"batch.?size|batch\.size", r"differ|!=|do not match|another run")
def other_batch(trial: Trial) -> None:
    trial.resumable()
    trial.change("batch", 2)
    trial.train(resume=True)


@row("resumed with another seed", NAMED, r"\bseed\b.*(differ|was|another|refused)")
def other_seed(trial: Trial) -> None:
    trial.resumable()
    trial.change("seed", 7)
    trial.train(resume=True)


# --- how ---


def _damaged(trial: Trial, what: str, damage: Callable[[Path], object]) -> None:
    trial.resumable()
    damage(trial.newest(what))
    trial.train(resume=True)


def _left(trial: Trial) -> str:
    found = sorted(path.name for path in (trial.folder / "out").iterdir() if "checkpoint" in path.name)
    return f"left: {', '.join(found)}"


def _content(trial: Trial) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((trial.folder / "out").rglob("*")) if path.is_file()}
