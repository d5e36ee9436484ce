"""`surefoot explain`: one config key in full, all of them in a table, or the code of an error."""

from __future__ import annotations

from difflib import get_close_matches

import click

from surefoot.commands.completion import complete_keys
from surefoot.commands.printing import echo
from surefoot.system.error_codes import CODES
from surefoot.system.errors import Fault, InputError


@click.command()
@click.argument("key", required=False, shell_complete=complete_keys)
def explain(key: str | None) -> None:
    """Explain one config key (optim.lr) or the code of an error (SF-DATA-ROW); list all keys, or all codes (SF)."""
    from surefoot.config.explain import explain_all, explain_key

    if key and key.upper().startswith("SF"):
        echo(explain_code(key.upper()))
    else:
        echo(explain_key(key) if key else explain_all())


def explain_code(code: str) -> str:
    """Cause and remedy of an error code; of "SF" a list of all. Raises InputError naming near ones."""
    if code == "SF":
        width = max(map(len, CODES)) + 2
        return "\n".join(f"{name:<{width}}{one.cause}" for name, one in CODES.items())
    if code not in CODES:
        near = get_close_matches(code, CODES, n=1)
        fix = f"did you mean {near[0]}?" if near else "`surefoot explain SF` lists all codes"
        raise InputError(Fault("", f"no error has the code {code}", fix, code="SF-USE-FLAG"))
    return f"{code}\n  cause   {CODES[code].cause}\n  remedy  {CODES[code].remedy}"
