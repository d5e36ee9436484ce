"""`surefoot compat`: write scripts with the names that existing launch scripts call."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.terminal import echo


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace files written by another version of surefoot.")
def compat(folder: Path, overwrite: bool) -> None:
    """Write finetune.py, llamafactory-cli, train_sft.py and the others into FOLDER.

    After `source FOLDER/activate`, finetune.py … runs surefoot from any folder. `python finetune.py` only finds the
    script in the working folder.
    """
    from surefoot.interop.compat import REGISTRY, write_scripts

    names = write_scripts(folder, overwrite=overwrite)
    for name in names:
        echo(folder / name)
    if REGISTRY not in names:
        echo(f"{folder / REGISTRY} already exists and was not changed")
    echo(f"next: source {folder}/activate; then finetune.py … runs anywhere, python finetune.py … only in {folder}")
