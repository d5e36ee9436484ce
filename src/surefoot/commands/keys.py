"""`surefoot explain`, `surefoot schema`, `surefoot completion`: config keys for people, editors and shells.

A shell's completion script calls surefoot at every TAB; that process imports click and, for keys, the config's schema,
but not torch.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from surefoot.commands.terminal import echo
from surefoot.system.error_codes import CODES
from surefoot.system.errors import Fault, InputError

VARIABLE = "_SUREFOOT_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
        bash: surefoot completion bash >> ~/.bashrc
        zsh:  surefoot completion zsh >> ~/.zshrc
        fish: surefoot completion fish > ~/.config/fish/completions/surefoot.fish
    """
    from surefoot.commands.main import main

    script = get_completion_class(shell)
    assert script is not None  # click knows all three
    click.echo(script(main, {}, "surefoot", VARIABLE).source())


def complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete config keys for `surefoot explain`."""
    from surefoot.config.keys import all_keys

    return [key for key in all_keys() if key.startswith(incomplete)]


def complete_overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete overrides: `optim.l` -> `optim.lr=`; `precision.compute=b` -> `precision.compute=bf16`."""
    before: tuple[str, ...] = ctx.params.get(param.name or "") or ()
    if len(before) > 1 and before[-1] == "=":  # bash breaks words at "=": complete only the value
        return [word for word in _values(before[-2]) if word.startswith(incomplete)]
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={word}" for word in _values(key) if word.startswith(start)]
    return [f"{name}=" for name in complete_keys(ctx, param, incomplete)]


def complete_configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete YAML files, and folders on the way to them."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else "."))
    entries = sorted(place.iterdir()) if place.is_dir() else []
    fitting = [entry for entry in entries if entry.name.startswith(start) and (start or not entry.name.startswith("."))]
    prefix = incomplete[: len(incomplete) - len(start)]
    return [
        CompletionItem(f"{prefix}{entry.name}{'/' if entry.is_dir() else ''}")
        for entry in fitting
        if entry.is_dir() or entry.suffix in (".yaml", ".yml")
    ]


def _values(key: str) -> tuple[str, ...]:
    from surefoot.config.keys import all_keys
    from surefoot.families.templates import NAMES

    if key == "data.template":
        return ("auto", *NAMES)
    known = all_keys().get(key)
    if known is None:
        return ()
    if known.item and known.expected.startswith("a list"):
        return tuple(f"[{choice}]" for choice in known.choices)
    return known.choices or (("true", "false") if known.expected == "true or false" else ())


@click.command()
@click.argument("key", required=False, shell_complete=complete_keys)
def explain(key: str | None) -> None:
    """Explain one config key (optim.lr) or the code of an error (SF-DATA-ROW); list all keys, or all codes (SF)."""
    from surefoot.config.explain import explain_all, explain_key

    if key and key.upper().partition("-")[0] == "SF":
        echo(explain_code(key.upper()))
    else:
        echo(explain_key(key) if key else explain_all())


def explain_code(code: str) -> str:
    """Cause and remedy of an error code; for "SF" a list of all codes. Raises InputError naming similar ones."""
    if code == "SF":
        width = max(map(len, CODES)) + 2
        return "\n".join(f"{name:<{width}}{one.cause}" for name, one in CODES.items())
    if code not in CODES:
        near = get_close_matches(code, CODES, n=1)
        fix = f"did you mean {near[0]}?" if near else "`surefoot explain SF` lists all codes"
        raise InputError(Fault("", f"unknown error code {code}", fix, code="SF-USE-FLAG"))
    return f"{code}\n  cause   {CODES[code].cause}\n  remedy  {CODES[code].remedy}"


@click.command()
def schema() -> None:
    """Print the JSON Schema of the config.

    Save it (surefoot schema > surefoot.schema.json) and put this line at the top of a config, so that editors complete
    and check it:

    \b
        # yaml-language-server: $schema=surefoot.schema.json
    """
    from surefoot.config.keys import config_schema

    click.echo(json.dumps(config_schema(), indent=2))
