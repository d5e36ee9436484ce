"""`surefoot compat`: scripts under the names that existing launch scripts call."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.terminal import echo


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace the files that another version of surefoot wrote.")
def compat(folder: Path, overwrite: bool) -> None:
    """Write finetune.py, llamafactory-cli, train_sft.py and the others into FOLDER.

    source FOLDER/activate puts them on the path: finetune.py … then runs surefoot from any folder. `python finetune.py`
    looks in the working folder alone, so for that write the scripts there.
    """
    from surefoot.interop.compat import REGISTRY, write_scripts

    names = write_scripts(folder, overwrite=overwrite)
    for name in names:
        echo(folder / name)
    if REGISTRY not in names:
        echo(f"{folder / REGISTRY} was there and stays as it is")
    echo(f"now: source {folder}/activate, then finetune.py … runs anywhere (python finetune.py … in {folder} alone)")
