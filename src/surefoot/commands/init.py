"""`surefoot init`: a commented config to start from."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.printing import echo
from surefoot.method_facts.methods import METHODS


@click.command()
@click.argument("model")
@click.argument("data")
@click.option(
    "--out", "out", default="run.yaml", show_default=True, type=click.Path(path_type=Path), help="Where to write it."
)
@click.option(
    "--stage",
    type=click.Choice([name for name, method in METHODS.items() if method.first_rate is not None]),
    help="What to train.  [default: what DATA are for; ppo: see recipes]",
)
def init(model: str, data: str, out: Path, stage: str | None) -> None:
    """Look at MODEL (folder or hub id) and DATA (file, folder or hub id) and write a config of what is wanted most, in
    which every line is explained. Nothing is asked and nothing is overwritten.

    The JSON Schema that editors check the config against is written beside it, as surefoot.schema.json.
    """
    from surefoot.config.keys import config_schema
    from surefoot.system.errors import Fault, InputError

    schema = out.parent / "surefoot.schema.json"
    for path in (out, schema):
        if path.exists() and not (path == schema and _is_ours(schema)):
            raise InputError(Fault(str(path), "already exists", "name another file with --out", code="SF-USE-OUTPUT"))

    from surefoot.commands.starting import propose
    from surefoot.system import durable

    text = propose(model, data, schema=schema.name, stage=stage)
    durable.make_folders(out.parent)
    durable.write_json(schema, config_schema())
    durable.write_text(out, text)
    echo(f"wrote {out} and {schema}")
    echo(f"next: surefoot plan {out}")


def _is_ours(schema: Path) -> bool:
    """Whether a schema is one of ours, which may be written again."""
    import json

    try:
        return json.loads(schema.read_text(encoding="utf-8")).get("title") == "surefoot config"
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
