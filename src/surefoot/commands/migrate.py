"""`surefoot migrate`: a config for another model family."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.printing import echo_json
from surefoot.commands.translated import recognised


@click.command()
@config_arguments
@click.option("--to", "model", required=True, metavar="MODEL", help="The new model: a folder or hub id.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write it; else beside CONFIG.")
@click.option("--hardware", "machine", metavar="NAME", help="Plan for another machine: h100, h200, a100, rtx4090, cpu.")
@click.option("--try", "try_out", is_flag=True, help="Take two steps on eight records with the new config.")
@click.option("--json", "as_json", is_flag=True, help="Print changes and checklist as JSON.")
def migrate(
    config: Path,
    overrides: tuple[str, ...],
    model: str,
    out: Path | None,
    machine: str | None,
    try_out: bool,
    as_json: bool,
) -> int:
    """Rewrite CONFIG.yaml for MODEL: module names, padding, template, learning rate, batch; then a checklist of what
    could be verified here and what is left to do.

    CONFIG.yaml stays as it is; comments are not carried over. What KEY=VALUE sets stands in the new config.
    """
    given = _given(config, overrides)
    out = out or config.with_name(f"{config.stem}-{_name(model)}.yaml")

    from surefoot.config.paths import model_problems
    from surefoot.system.errors import Fault, InputError

    if faults := [Fault("--to", problem.what, problem.fix, problem.code) for problem in model_problems(model)]:
        raise InputError(faults)

    from surefoot.commands.migration import migrate_config
    from surefoot.report.console import open_console
    from surefoot.report.tables.migration import migration_report
    from surefoot.system import durable, hardware, process

    if out.exists():
        raise InputError(Fault(str(out), "already exists", "name another file with --out", code="SF-USE-OUTPUT"))
    described = hardware.preset(machine) if machine else None
    console = open_console(sys.stderr if as_json else sys.stdout, process.terminal_wishes())
    with open(os.devnull, "w", encoding="utf-8") as nothing:  # the steps of a trial are not worth reading
        quiet = open_console(nothing, process.terminal_wishes())
        found = migrate_config(given, model, described, try_out=quiet if try_out else None)
    durable.make_folders(out.parent)
    durable.write_text(out, found.text)
    if as_json:
        from dataclasses import asdict

        shown = {
            "config": str(out),
            "moves": [asdict(one) for one in found.migration.moves],
            "checks": [asdict(one) for one in found.checks],
        }
        echo_json(shown)
    else:
        console.show(migration_report(found.migration.moves, [(one.what, one.state, one.said) for one in found.checks]))
        console.say(f"wrote {out}")
        console.say(f"next: surefoot plan {out}")
    return 3 if any(one.state == "failed" for one in found.checks) else 0


def _given(config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys that the file and the overrides set, short forms written out; of another tool's file what it means."""
    from surefoot.config.overrides import expand_short_forms
    from surefoot.system.errors import Fault, InputError

    if config.suffix in (".sh", ".bash"):
        fix = "surefoot translate -- ITS COMMAND > run.yaml, and migrate that"
        raise InputError(Fault(str(config), "is a script of commands, and no config", fix, code="SF-TRANSLATE-COMMAND"))
    translation = recognised(config, overrides)
    if translation is not None:
        return expand_short_forms(dict(translation.config))
    return load_or_exit(config, overrides).given


def _name(model: str) -> str:
    return model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
