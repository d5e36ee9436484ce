"""`surefoot run -- COMMAND`: another tool's command, translated and carried out. Nothing is passed to a shell."""

from __future__ import annotations

import os
from dataclasses import replace

import click

from surefoot.commands.checking import checking
from surefoot.commands.printing import echo
from surefoot.commands.translated import WordsCommand, own_and_command, reading_options, translated_command


@click.command(cls=WordsCommand)
@click.argument("words", nargs=-1, required=True, metavar="[KEY=VALUE]... -- [NAME=value]... COMMAND...")
@click.option("--allow-unknown", is_flag=True, help="Pass by words that the tool does not know.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint that verifies, or start.")
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on the screen but errors; run.log has all of it.")
@click.option("--dry-run", is_flag=True, help="Plan, read the data, and stop; write nothing.")
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
    check: int | None,
) -> int:
    """Run a command of another tool with surefoot.

    surefoot run -- CUDA_VISIBLE_DEVICES=0 llamafactory-cli train my-config.yaml

    surefoot run log_every=1 -- python finetune.py --base_model ...

    Keys of surefoot's own stand before --, variables of the environment behind it. surefoot translate shows what
    becomes of a command.
    """
    from surefoot.commands.train import train_translation
    from surefoot.interop.tools import command_help

    if resume and overwrite:
        raise click.UsageError("--resume continues a run and --overwrite replaces it: give one of them")
    if flags := command_help(own_and_command(ctx, words)[1], reading_options()):
        _show_flags(*flags)
        return 0
    found = translated_command(ctx, words, allow_unknown=allow_unknown)
    if resume or overwrite:
        kept = [word for word in found.arguments if word not in ("--resume", "--overwrite")]
        found = replace(found, arguments=("--resume" if resume else "--overwrite", *kept))
    if found.command == "train":
        return train_translation(found, quiet=quiet, dry_run=dry_run, check=check)
    return _other_command(ctx, found.command, found.arguments, found.environment)


def _show_flags(name: str, flags: list[tuple[str, str]]) -> None:
    formatter = click.HelpFormatter(max_width=100)
    formatter.write_text(f"{name}, read by surefoot: each flag with its default, and what becomes of it.")
    with formatter.section("Flags"):
        formatter.write_dl(flags, col_max=44)
    formatter.write_text("surefoot translate -- COMMAND shows what becomes of a command as you write it.")
    echo(formatter.getvalue().rstrip())


def _other_command(ctx: click.Context, name: str, arguments: tuple[str, ...], environment: object) -> int:
    """export, chat, evaluate …: the words are surefoot's own by now."""
    from surefoot.commands.main import main

    assert isinstance(environment, dict)
    command = main.get_command(ctx, name)
    if command is None:
        raise click.UsageError(f"this surefoot has no command {name}")
    os.environ.update(environment)
    with command.make_context(name, list(arguments), parent=ctx.parent) as inner:
        code = command.invoke(inner)
    return code if isinstance(code, int) else 0
