"""Train what a script built: `surefoot run -- python train.py`, and `translate` for the same without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.terminal import Invocation, echo
from surefoot.commands.train import TrainFlags, train_translation
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.interop.launch import Command, Options
    from surefoot.interop.takeover import Session, Taken
    from surefoot.interop.translation import Translation

LOSS_BOUND = 1e-4
"""Largest relative difference of loss and gradient norm in fp32: two orders of summation over a vocabulary."""

QUANTISED_BOUND = 1e-2
"""The same over a quantised base, whose products the script computes in 16 bits."""

LossOf = Callable[[Sequence[int]], tuple[float, float]]
_COMPARED = 4  # rows


def train_script(
    words: Sequence[str],
    command: Command,
    options: Options,
    own: Sequence[str],
    dropped: Sequence[str],
    flags: TrainFlags,
) -> int:
    """Run the script, train what it built, and let it continue with the trained weights. Returns the exit code.

    words: the command as typed, after `--`. command: the same, read.
    own: surefoot's own keys before `--`.
    dropped: names of what surefoot cannot take over and the user gives up.
    """
    from surefoot.interop.takeover import Session

    echo(f"running {command.program} until it calls train() …")
    with Session(words, command) as session:
        taken, found, path = _translated(session, command, options, own, dropped)
        run = Path(found.config["output"])
        echo(f"taken over from {taken.record['trainer']}: {len(taken.places):,} rows, settings in {path}")
        invocation = click.get_current_context().ensure_object(Invocation)
        typed = invocation.typed
        mode = () if flags.mode is None else (f"--{flags.mode}",)
        invocation.typed = ("train", str(path), *mode)  # what ranks run, and what continues the run alone
        prove(taken, found, session.loss_of)
        code = train_translation(found, flags, path)
        invocation.typed = typed
        if code != 0 or flags.dry_run or flags.check is not None:
            return code
        results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
        echo(f"{command.program} goes on after train(), with the trained weights")
        after = session.finish(run, int(results["train_steps"]), results.get("train_loss"))
    if after != 0:
        echo(f"error: the training is done ({run}), but the script failed after it (exit code {after})", err=True)
    return after


def translate_script(
    words: Sequence[str], command: Command, options: Options, own: Sequence[str], dropped: Sequence[str]
) -> Translation:
    """Run the script until it calls train(), and return the config for what it built; its data and model are stored."""
    from surefoot.interop.takeover import Session

    with Session(words, command) as session:
        return _translated(session, command, options, own, dropped)[1]


def _translated(
    session: Session, command: Command, options: Options, own: Sequence[str], dropped: Sequence[str]
) -> tuple[Taken, Translation, Path]:
    """Return what was handed over, its translation, and the config file written beside it."""
    from surefoot.interop.draft import with_overrides
    from surefoot.interop.takeover import translation_of
    from surefoot.interop.translation import as_yaml, in_processes
    from surefoot.system import durable

    taken = session.taken()
    found = translation_of(taken, command, options, dropped)
    found = with_overrides(in_processes(found, command.processes, command.engine), own)
    path = taken.folder / "surefoot.yaml"
    durable.write_text(path, as_yaml(found))
    return taken, found, path


def prove(taken: Taken, found: Translation, loss_of: LossOf) -> None:
    """Compare the script's own loss and gradient norm with surefoot's, on rows of the first step.

    loss_of: indices into the script's data set -> its loss and gradient norm.

    Raises InputError if they differ by more than the bound.
    """
    from surefoot.commands.translate import checked

    config = checked(found)
    rows, loss, norm = _first_loss(config)
    theirs = loss_of([taken.places[row - 1] for row in rows])
    bound = QUANTISED_BOUND if "quantised" in taken.record else LOSS_BOUND
    pairs = {"loss": (theirs[0], loss), "gradient norm": (theirs[1], norm)}
    apart = {name: abs(a - b) / max(abs(a), abs(b), 1e-12) for name, (a, b) in pairs.items()}
    said = ", ".join(f"{name} {b:.6g} and {a:.6g}" for name, (a, b) in pairs.items())
    where = f"rows {', '.join(map(str, rows))}"
    if not all(value <= bound for value in apart.values()):
        what = f"here and in the script differ ({said}; allowed is {bound:g} of either)"
        raise InputError(Fault(where, what, "the script computes another loss", code="SF-TAKE-OVER"))
    echo(f"the same as the script's own computation in fp32, on {len(rows)} rows: {said}")


def _first_loss(config: RunConfig) -> tuple[list[int], float, float]:
    """Return (row numbers, loss, gradient norm) of some rows of the first step, in plain fp32 without dropout."""
    from surefoot.commands.doctor.parity import plainest
    from surefoot.config.schema import QUANTISED
    from surefoot.models.modes import without_randomness
    from surefoot.report.library_messages import captured_libraries
    from surefoot.report.observer import silent_console
    from surefoot.runs.trial import ready

    alone = config.model_copy(update={"parallel": type(config.parallel)()})
    twin = plainest(alone)
    if config.precision.base in QUANTISED:
        twin = twin.model_copy(update={"precision": twin.precision.model_copy(update={"base": config.precision.base})})
    with silent_console() as silence, captured_libraries(silence), ready(twin, 1) as one:
        model = one.loaded.engine.model
        with without_randomness(model):
            report = one.step_at(1, one.batches(1)[:_COMPARED], lambda schedule: 0.0, None)
    rows = [int(row) for row in report.examples]
    return rows, float("nan") if report.loss is None else report.loss, report.grad_norm or float("nan")
