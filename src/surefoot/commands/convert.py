"""`surefoot convert`: weights in any recognised layout to a normal folder, or back."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo
from surefoot.models.convert.layouts import LAYOUTS, TARGETS


def _list(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from surefoot.models.convert.rules import KINDS

    echo("layouts, and the rules that lead from each to transformers' or PEFT's (* --to writes it)")
    for layout in LAYOUTS:
        rules = f"  [{', '.join(layout.rules)}]" if layout.rules else ""
        echo(f"  {'*' if layout.to else ' '} {layout.name:<15} {layout.told_by.replace('`', '')}{rules}")
    echo("rules, and what undoes them")
    for name, kind in KINDS.items():
        echo(f"    {name:<16} {kind.sentence}; undone by: {kind.inverse or 'nothing'}")
    ctx.exit()


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the result.")
@click.option("--to", type=click.Choice(TARGETS), help="Layout to write.  [default: hf for models, peft for adapters]")
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with what SOURCE lacks: config, tokenizer, output head.",
)
@click.option(
    "--list", "show", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Print layouts and rules."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier conversion in --out.")
def convert(source: Path, out: Path | None, to: str | None, base: Path | None, dry_run: bool, overwrite: bool) -> None:
    """Write the weights in SOURCE, a folder or a file, as a normal safetensors folder.

    The layout is recognised by the names and shapes; every value stays as it is, bit for bit. Pickled files and ZeRO
    checkpoints are opened in a child process that can run nothing. convert.json records what was done.
    """
    from surefoot.config.paths import nearest_path
    from surefoot.system.errors import Fault, InputError

    if not source.exists():
        raise InputError(Fault(str(source), "no such file or folder", nearest_path(source, ()), code="SF-FILE-MISSING"))
    if out is None and not dry_run:
        raise click.UsageError("missing option '--out'; or look first with --dry-run")

    from surefoot.models.convert.source import weight_files

    weight_files(source)

    from surefoot.commands.conversion import RECORD, convert_weights

    result = convert_weights(source, None if dry_run else out, to=to, base=base, overwrite=overwrite)
    own = "transformers' own layout" if result.kind == "model" else "PEFT's own layout"
    found = ", ".join(result.layouts) or own
    echo(f"{source}: {result.kind}, {result.keys_in} weights; found: {found}")
    for rule in result.rules:
        echo(f"  {rule.kind}: {_told(rule.settings)}")
    for note in result.notes:
        echo(f"note: {note}")
    count = len(result.tensors) + len(result.value_head)
    if dry_run:
        echo(f"{count} weights would be written as {result.to}; nothing was written")
    else:
        echo(f"{count} weights written as {result.to} to {out}: {', '.join(result.files)}, {RECORD}")


def _told(settings: object) -> str:
    """A rule's settings in one line; long lists by their first items."""
    assert isinstance(settings, dict)
    shown = []
    for key, value in settings.items():
        if isinstance(value, list):
            items = [repr(item) if item == "" else str(item) for item in value[:4]]
            value = "[" + ", ".join(items + ["…"] * (len(value) > 4)) + "]"
            if value == "[]":
                continue
        shown.append(f"{key} {value}")
    return ", ".join(shown) or "all"
