"""`surefoot run -- COMMAND`: translate another tool's command and run it. Nothing is passed to a shell.

`call_words` and `call_training` do the same for Python callers, such as compat scripts (`from finetune import train`,
`run_exp`). They raise an exception of `surefoot.system.errors` with the text that the command line would print, and
KeyboardInterrupt for a run stopped by a signal, so that no caller continues with a half-trained model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import click

from surefoot.commands.main import main
from surefoot.commands.terminal import Invocation, echo
from surefoot.commands.train import TrainFlags, checking, chosen_mode, train_translation
from surefoot.commands.translate import (
    WordsCommand,
    dropping,
    own_and_command,
    reading_options,
    trainer_script,
    translated_command,
)
from surefoot.interop.translation import Translation
from surefoot.system.errors import STOPPED_EXIT_CODE, InputError, SurefootError


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

    mode = chosen_mode(resume, overwrite)
    if flags := command_help(own_and_command(ctx, words)[1], reading_options()):
        _show_flags(*flags)
        return 0
    own, command_words = own_and_command(ctx, words)
    if (command := trainer_script(command_words)) is not None:
        from surefoot.commands.take_over import train_script

        taking = TrainFlags(mode, quiet=quiet, dry_run=dry_run, check=check)
        return train_script(command_words, command, reading_options(allow_unknown=allow_unknown), own, drop, taking)
    found = translated_command(ctx, words, allow_unknown=allow_unknown)
    if mode is not None:
        kept = [word for word in found.arguments if word not in ("--resume", "--overwrite")]
        found = replace(found, arguments=(f"--{mode}", *kept))
    if found.command == "train":
        return train_translation(found, TrainFlags(quiet=quiet, dry_run=dry_run, check=check))
    return _other_command(ctx, found.command, found.arguments, found.environment)


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
