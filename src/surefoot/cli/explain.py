"""`surefoot explain`: one config key in full, or all of them in a table."""

from __future__ import annotations

import click


def _complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from surefoot.config.keys import all_keys

    return [key for key in all_keys() if key.startswith(incomplete)]


@click.command()
@click.argument("key", required=False, shell_complete=_complete_keys)
def explain(key: str | None) -> None:
    """Explain one config key (optim.lr), or list all keys."""
    from surefoot.config.explain import explain_all, explain_key

    click.echo(explain_key(key) if key else explain_all())
