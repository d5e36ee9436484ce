"""`surefoot run -- COMMAND`: translate another tool's command and run it. Nothing is passed to a shell.

`call_words` and `call_training` do the same for Python callers, such as compat scripts (`from finetune import train`,
`run_exp`). They raise an exception of `surefoot.system.errors` with the text that the command line would print, and
KeyboardInterrupt for a run stopped by a signal, so that no caller continues with a half-trained model.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.main import main
from surefoot.commands.terminal import Invocation, echo
from surefoot.commands.train import Terminated, TrainFlags, checking, chosen_mode, raised_on_sigterm, train_translation
from surefoot.commands.translate import (
    WordsCommand,
    checked,
    dropping,
    own_and_command,
    reading_options,
    trainer_script,
    translated,
    translated_command,
)
from surefoot.interop.translation import Translation
from surefoot.system.errors import STOPPED_EXIT_CODE, Fault, InputError, SurefootError

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.interop.launch import Command, Options
    from surefoot.interop.takeover import Taken


LOSS_BOUND = 1e-4
"""Largest relative difference of loss and gradient norm in fp32: two orders of summation over a vocabulary."""

QUANTIZED_BOUND = 1e-2
"""The same over a quantized base, whose products the script computes in 16 bits."""

LossOf = Callable[[Sequence[int]], Mapping[str, float]]
_COMPARED = 4  # examples


@click.command(cls=WordsCommand)
@click.argument("words", nargs=-1, required=True, metavar="[KEY=VALUE]... -- [NAME=value]... COMMAND...")
@click.option("--allow-unknown", is_flag=True, help="Ignore arguments that the tool does not know.")
@click.option(
    "--resume", is_flag=True, help="Continue from the newest checkpoint that verifies, or start if there is none."
)
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors; run.log has everything.")
@click.option("--dry-run", is_flag=True, help="Plan, read the data and stop, without creating the run folder.")
@dropping
@checking
@click.pass_context
def run(
    ctx: click.Context,
    words: tuple[str, ...],
    allow_unknown: bool,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    dry_run: bool,
    drop: tuple[str, ...],
    check: int | None,
) -> int:
    """Run a command of another tool with surefoot.

    surefoot run -- CUDA_VISIBLE_DEVICES=0 llamafactory-cli train my-config.yaml

    surefoot run log_every=1 -- python finetune.py --base_model ...

    surefoot run -- python train.py        (a script of your own that calls Trainer.train(): it is run up to there)

    Put surefoot's own keys before --, environment variables after it. surefoot translate shows how a command is
    translated.
    """
    from surefoot.interop.registry import command_help
    from surefoot.interop.translation import with_mode

    mode = chosen_mode(resume, overwrite)
    if flags := command_help(own_and_command(ctx, words)[1], reading_options()):
        _show_flags(*flags)
        return 0
    own, command_words = own_and_command(ctx, words)
    if (command := trainer_script(command_words)) is not None:
        taking = TrainFlags(mode, quiet=quiet, dry_run=dry_run, check=check)
        options = reading_options(allow_unknown=allow_unknown)
        try:
            with raised_on_sigterm():
                return _train_script(command_words, command, options, own, drop, taking)
        except Terminated:
            echo(f"\nterminated, and {command.program} with it; the same command begins again", err=True)
            return STOPPED_EXIT_CODE
    found = translated_command(ctx, words, allow_unknown=allow_unknown)
    found = with_mode(found, mode)
    if found.command == "train":
        return train_translation(found, TrainFlags(quiet=quiet, dry_run=dry_run, check=check))
    return _other_command(ctx, found.command, found.arguments, found.environment)


def _train_script(
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
    from surefoot.interop.takeover import Session, own_losses
    from surefoot.interop.translation import MODES

    echo(f"running {command.program} until it calls train() …")
    with Session(words, command) as session:
        taken, found, path = translated(session, command, options, own, dropped, flags.mode, compared=True)
        run = Path(found.config["output"])
        echo(f"taken over from {taken.record['trainer']}: {len(taken.places):,} rows, settings in {path}")
        if not taken.stored:
            prove(taken, found, lambda places: session.loss_of(places, dropped), own_losses(taken, dropped))
        invocation = click.get_current_context().ensure_object(Invocation)
        typed = invocation.typed
        mode = (word for word in found.arguments if word in MODES)
        invocation.typed = ("train", str(path), *mode)  # what ranks run, and what continues the run alone
        code = train_translation(found, flags, str(path))
        invocation.typed = typed
        if code != 0 or flags.dry_run or flags.check is not None:
            return code
        results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
        echo(f"{command.program} goes on after train(), with the trained weights")
        after = session.finish(run, int(results["train_steps"]), results.get("train_loss"))
    if after != 0:
        echo(f"error: the training is done ({run}), but the script failed after it (exit code {after})", err=True)
    return after


def prove(taken: Taken, found: Translation, loss_of: LossOf, own: Sequence[str] = ()) -> None:
    """Compare the script's own loss and gradient norm with surefoot's, on rows of the first step; of a method that
    draws answers, the tokens of the first prompts.

    loss_of: indices into the script's data set -> loss, norm and counted of `HandOver.loss_of`.
    own: names of the script's own code that computes its loss.

    Raises InputError if they differ by more than the bound, or if a loss of its own cannot be compared.
    """
    if prompts := taken.record.get("prompts"):
        apart = [number for number, ids in _prompts(checked(found), len(prompts)).items() if ids != prompts[number - 1]]
        if apart:
            what = f"the prompt of row {apart[0]} has other tokens here than in the script"
            raise InputError(Fault(f"row {apart[0]}", what, "write the prompts as TRL does", code="SF-TAKE-OVER"))
        echo(f"the first {len(prompts)} prompts have the tokens of the script's own; answers are drawn by the run")
        return
    try:
        rows, loss, norm = _first_loss(checked(found))
    except InputError as error:
        if own or {fault.code for fault in error.faults} != {"SF-MEMORY"}:
            raise
        echo("caution: not compared with the script's own computation: the model in plain fp32 does not fit here")
        return
    theirs = loss_of([taken.places[row - 1] for row in rows])
    bound = QUANTIZED_BOUND if "quantised" in taken.record else LOSS_BOUND
    pairs = {"loss": (theirs["loss"], loss), "gradient norm": (theirs["norm"], norm)}
    apart = {name: abs(a - b) / max(abs(a), abs(b), 1e-12) for name, (a, b) in pairs.items()}
    said = ", ".join(f"{name} {b:.6g} and {a:.6g}" for name, (a, b) in pairs.items())
    where = f"rows {', '.join(map(str, rows))}"
    if not all(value <= bound for value in apart.values()):
        what = f"here and in the script differ ({said}; allowed is {bound:g} of either)"
        fix = f"train with surefoot's loss: --drop {own[0]}" if own else "the script computes another loss"
        raise InputError(Fault(where, what, fix, code="SF-TAKE-OVER"))
    if abs(theirs["counted"] - 1) > bound:
        less = 1 - 1 / theirs["counted"]
        echo(
            f"its transformers also divides by tokens that it does not learn: its own log shows losses {less:.1%} lower"
        )
    if led := theirs.get("led"):
        echo(f"it also learns the first token of {led} of these rows, from padding before it; that is left out here")
    echo(f"the same as the script's own computation in fp32, on {len(rows)} rows: {said}")
    if own:
        echo(f"caution: {', '.join(own)} of the script is not called; on later rows it may compute another loss")


def _prompts(config: RunConfig, count: int) -> dict[int, list[int]]:
    """Return the tokens of the first prompts by the number of their row; those that are too long are left out."""
    from surefoot.report.library_messages import captured_libraries
    from surefoot.report.observer import silent_console
    from surefoot.runs.custom import with_named
    from surefoot.runs.prepare import prepare
    from surefoot.runs.run_folder import FolderState

    with silent_console() as silence, captured_libraries(silence), tempfile.TemporaryDirectory() as folder:
        data = prepare(config, FolderState(Path(folder), "new"), silence, with_named(config)).task.data.train
    rows = map(data.__getitem__, range(min(count, len(data))))
    return {int(row.number): row.ids.tolist() for row in rows if int(row.number) <= count}


def _first_loss(config: RunConfig) -> tuple[list[int], float, float]:
    """Return (row numbers, loss, gradient norm) of a first step of a few examples, in plain fp32 without dropout."""
    from surefoot.commands.doctor.parity import plainest
    from surefoot.config.schema import QUANTIZED
    from surefoot.models.modes import without_randomness
    from surefoot.planning.reference import CACHED
    from surefoot.report.library_messages import captured_libraries
    from surefoot.report.observer import silent_console
    from surefoot.runs.parity.passes import loss_and_norm
    from surefoot.runs.trial import ready

    few = config.batch.model_copy(update={"size": min(_COMPARED, config.batch.size), "row_tokens": None})
    changes: dict[str, Any] = {"parallel": type(config.parallel)(), "batch": few}
    if config.method.reference and config.alignment.reference == CACHED:  # of the whole data set, and in fp32
        changes["alignment"] = config.alignment.model_copy(update={"reference": "auto"})
    twin = plainest(config.model_copy(update=changes))
    if config.precision.base in QUANTIZED:
        twin = twin.model_copy(update={"precision": twin.precision.model_copy(update={"base": config.precision.base})})
    with silent_console() as silence, captured_libraries(silence), ready(twin, 1) as one:
        batches = one.run.task.batches(1)
        with without_randomness(one.loaded.engine.model):
            loss, norm = loss_and_norm(one.loaded, one.run.task, batches)
    return [int(row) for batch in batches for row in batch.examples], loss, norm


def _show_flags(name: str, flags: list[tuple[str, str]]) -> None:
    formatter = click.HelpFormatter(max_width=100)
    formatter.write_text(f"{name}, read by surefoot: each flag with its default and its translation.")
    with formatter.section("Flags"):
        formatter.write_dl(flags, col_max=44)
    formatter.write_text("surefoot translate -- COMMAND shows how your command is translated.")
    echo(formatter.getvalue().rstrip())


def _other_command(ctx: click.Context, name: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> int:
    """Run export, chat, evaluate …; the arguments are already translated to surefoot's."""
    command = main.get_command(ctx, name)
    if command is None:
        raise click.UsageError(f"this surefoot has no command {name}")
    os.environ.update(environment)  # variables set on the original command line
    with command.make_context(name, list(arguments), parent=ctx.parent) as inner:
        code = command.invoke(inner)
    return code if isinstance(code, int) else 0


def call_words(words: Sequence[str]) -> None:
    """Run `surefoot run -- WORDS`."""
    invocation = Invocation(typed=("run", "--", *words))
    _call(invocation, lambda: main(list(invocation.typed), standalone_mode=False, obj=invocation))


def call_training(read: Callable[[], Translation], words: Sequence[str]) -> None:
    """Train from the translation that `read` returns. words: an equivalent command, for the resume hint."""
    invocation = Invocation(typed=("run", "--", *words))

    def train() -> int:
        with click.Context(main, obj=invocation):
            return train_translation(read(), TrainFlags())

    _call(invocation, train)


def _call(invocation: Invocation, run: Callable[[], object]) -> None:
    try:
        code = run()
    except click.ClickException as error:
        raise InputError(error.format_message()) from None
    except SurefootError as error:
        if not error.faults:  # another rank prints the reason
            raise
        raise type(error)([invocation.locate(fault) for fault in error.faults]) from None
    if code == STOPPED_EXIT_CODE:
        raise KeyboardInterrupt("the run was stopped; its last lines say how to resume")
