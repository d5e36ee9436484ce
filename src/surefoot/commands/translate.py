"""`surefoot translate`: another tool's config or command line as surefoot YAML, and what became of every word."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo
from surefoot.commands.translated import WordsCommand, is_command, reading_options, translated_command, values_checked
from surefoot.system.messages import shown_json


@click.command(cls=WordsCommand, context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, required=True, metavar="FILE [KEY=VALUE]... | [KEY=VALUE]... -- COMMAND...")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the YAML there, if nothing is.")
@click.option("--json", "as_json", is_flag=True, help="Print config and account as JSON.")
@click.option(
    "--allow-unknown", is_flag=True, help="List words that the tool does not know, in place of refusing them."
)
@click.pass_context
def translate(ctx: click.Context, words: tuple[str, ...], out: Path | None, as_json: bool, allow_unknown: bool) -> None:
    """Translate a config of another tool, or a command behind --, and say what was carried over and what was not.

    surefoot translate examples/llama3_lora_sft.yaml lora_rank=16

    surefoot translate -- llamafactory-cli train --stage sft --do_train ...

    KEY=VALUE behind a file are the tool's own words; before -- they are keys of surefoot's.
    """
    from surefoot.interop.account import as_yaml, to_json
    from surefoot.interop.tools import translate_file
    from surefoot.system.errors import Fault, InputError

    if is_command(ctx):
        found = translated_command(ctx, words, allow_unknown=allow_unknown)
    else:
        options = reading_options(allow_unknown=allow_unknown)
        found = translate_file(words[0], options.read(words[0]), words[1:], options)
    if found.config:
        values_checked(found)
    if as_json:
        shown = shown_json({"config": found.config, **to_json(found)}, default=str)
    else:
        shown = as_yaml(found).rstrip("\n")
    if out is None:
        echo(shown)
        return
    if out.exists():
        raise InputError(Fault(str(out), "exists", "name another file, or remove it", code="SF-USE-OUTPUT"))
    from surefoot.interop.account import summary
    from surefoot.system import durable

    durable.write_text(out, f"{shown}\n")
    echo(f"{out}: {summary(found)}")
