"""What a command prints by itself, beside its console: text that a terminal only shows, and JSON of the same kind."""

from __future__ import annotations

from typing import Any

import click

from surefoot.system.messages import clean, shown_json


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Names and texts of strangers may stand in it."""
    click.echo(clean(str(text)), err=err, nl=nl)


def echo_json(value: Any, indent: int | None = 2, **settings: Any) -> None:
    """On stdout. settings: of `json.dumps`."""
    click.echo(shown_json(value, indent, **settings))
