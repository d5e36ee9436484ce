"""`surefoot explain`: one config key in full, or all of them in a table."""

from __future__ import annotations

import click

from surefoot.commands.completion import complete_keys
from surefoot.commands.printing import echo


@click.command()
@click.argument("key", required=False, shell_complete=complete_keys)
def explain(key: str | None) -> None:
    """Explain one config key (optim.lr), or list all keys."""
    from surefoot.config.explain import explain_all, explain_key

    echo(explain_key(key) if key else explain_all())
