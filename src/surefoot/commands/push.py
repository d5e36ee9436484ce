"""`surefoot push`: a finished run to the hub."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo
from surefoot.system.messages import counted


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Let everyone see it; private otherwise.")
@click.option(
    "--base", metavar="OWNER/NAME", help="The base of an adapter on the hub, where it was trained on a folder."
)
@click.option("--dry-run", is_flag=True, help="List what would be uploaded; ask the hub nothing.")
def push(run: Path, name: str, public: bool, base: str | None, dry_run: bool) -> None:
    """Upload the model, tokenizer and card of RUN to the hub as OWNER/NAME.

    Every file but the card, which is yours to edit, is verified first. Checkpoints, optimizer, logs and records stay on
    this machine.
    """
    from surefoot.system.folders import require_run
    from surefoot.system.locations import check_name

    check_name(name)
    require_run(run)

    from surefoot.commands.pushing import push_run, pushed_files

    if not dry_run:
        echo(f"pushed: {push_run(run, name, public=public, base=base)}")
        return
    files = pushed_files(run, base)
    for file in files:
        echo(f"{file.size:>16,}  {file.name}")
    total, kind = sum(file.size for file in files), "public" if public else "private"
    echo(f"{total:>16,}  bytes in {counted(len(files), 'file')} would go to {name} ({kind}); nothing was sent")
