"""`surefoot schema`: the config as a JSON Schema, for editors."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON Schema of the config.

    Save it (surefoot schema > surefoot.schema.json) and put this line on top of a config, so that editors complete and
    check it:

    \b
        # yaml-language-server: $schema=surefoot.schema.json
    """
    from surefoot.config.keys import config_schema

    click.echo(json.dumps(config_schema(), indent=2))
