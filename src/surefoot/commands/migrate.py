"""`surefoot migrate`: rewrite a config for a model of another family, with a checklist: access, memory, trial steps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Group, RenderableType
from rich.text import Text

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import echo_json, screen
from surefoot.commands.translate import recognized
from surefoot.config.dump import dump_plain, shown
from surefoot.config.load import check_config
from surefoot.config.overrides import expand_short_forms, value_at
from surefoot.config.paths import model_problems
from surefoot.config.schema import RunConfig
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.memory import fits, usable
from surefoot.planning.migration import Migration, Move
from surefoot.planning.migration import migrate as migrate_settings
from surefoot.planning.plan import RunPlan
from surefoot.report.console import Console, Hanging, open_console
from surefoot.system import durable, hardware, process
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.hub import is_signed_in
from surefoot.system.locations import looks_local
from surefoot.system.messages import counted, size_text


@click.command()
@config_arguments
@click.option("--to", "model", required=True, metavar="MODEL", help="The new model: a folder or hub id.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write it.  [default: next to CONFIG]")
@click.option(
    "--hardware", "machine", metavar="NAME", help="Plan for another machine: h100, a40, t4, cpu ..., or 48GiB."
)
@click.option("--try", "try_out", is_flag=True, help="Run two steps on eight records with the new config.")
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
    """Rewrite CONFIG.yaml for MODEL: module names, padding, template, learning rate, batch. Then print a checklist of
    what was verified here and what remains to do.

    CONFIG.yaml is not changed; comments are not copied. KEY=VALUE overrides are part of the new config.
    """
    given = _given(config, overrides)
    out = out or config.with_name(f"{config.stem}-{_name(model)}.yaml")

    if faults := [Fault("--to", problem.what, problem.fix, problem.code) for problem in model_problems(model)]:
        raise InputError(faults)

    if out.exists():
        raise InputError(Fault(str(out), "already exists", "name another file with --out", code="SF-USE-OUTPUT"))
    described = hardware.preset(machine) if machine else None
    console = screen(err=as_json)
    with open(os.devnull, "w", encoding="utf-8") as nothing:  # hide the output of the trial steps
        quiet = open_console(nothing, process.terminal_wishes())
        found = migrate_config(given, model, described, try_out=quiet if try_out else None)
    durable.make_folders(out.parent)
    durable.write_text(out, found.text)
    if as_json:
        moves, checks = ([asdict(one) for one in several] for several in (found.migration.moves, found.checks))
        echo_json({"config": str(out), "moves": moves, "checks": checks})
    else:
        console.show(_report(found.migration.moves, found.checks))
        console.say(f"wrote {out}")
        console.say(f"next: surefoot plan {out}")
    return 3 if any(one.state == "failed" for one in found.checks) else 0


_MARKS = {"done": ("[x]", "green"), "open": ("[ ]", ""), "unasked": ("[-]", ""), "failed": ("[!]", "yellow")}


def _report(moves: Sequence[Move], checks: Sequence[Check]) -> RenderableType:
    parts: list[RenderableType] = [Text("changed", "bold")]
    width = max(len(move.key) for move in moves)
    parts += [Hanging(Text(f"  {move.key:<{width}}  "), Text(f"{_change(move)} ({move.why})")) for move in moves]
    parts += [Text(), Text("checklist", "bold")]
    width = max(len(one.what) for one in checks)
    for one in checks:
        mark, style = _MARKS[one.state]
        parts.append(Hanging(Text(f"  {mark} {one.what:<{width}}  ", style), Text(one.said)))
    return Group(*parts)


def _change(move: Move) -> str:
    if move.new is None:
        return f"{shown(move.old)} removed"
    return shown(move.new) if move.old is None else f"{shown(move.old)} -> {shown(move.new)}"


def _given(config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Keys set by the file and the overrides, short forms expanded; another tool's file is translated first."""
    if config.suffix in (".sh", ".bash"):
        fix = "run surefoot translate -- ITS COMMAND > run.yaml and migrate that file"
        raise InputError(Fault(str(config), "is a script of commands, not a config", fix, code="SF-TRANSLATE-COMMAND"))
    translation = recognized(config, overrides)
    if translation is not None:
        return expand_short_forms(dict(translation.config))
    return load_or_exit(config, overrides).given


def _name(model: str) -> str:
    return model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


_TRIED_STEPS, _TRIED_RECORDS = 2, 8


@dataclass(frozen=True)
class Check:
    """One line of the checklist. state: done, open (for the user to check), unasked (not checked), failed."""

    what: str
    state: Literal["done", "open", "unasked", "failed"]
    said: str


@dataclass(frozen=True)
class Migrated:
    """The result of a migration. text: the new config as YAML."""

    migration: Migration
    checks: tuple[Check, ...]
    text: str


def migrate_config(
    given: Mapping[str, Any], path: str, machine: hardware.Hardware | None, *, try_out: Console | None = None
) -> Migrated:
    """Migrate a config to another model.

    given: keys as the user set them, short forms expanded.
    path: folder or hub id of the new model.
    machine: the machine to plan for, None for this one.
    try_out: console for trial steps with the new config; None takes none.

    Raises InputError for a config that would not run or already has this model, EnvironmentFault if the hub denies
    access to the new model.
    """
    if _is_same(str(value_at(given, "model.path")), path):
        what = f"{path} is already the model of this config"
        raise InputError(Fault("--to", what, "name another model", code="SF-USE-FLAG"))
    folder = resolve_folder(path, weights=False)
    migration = migrate_settings(given, path, facts_of(folder))
    checks = [_access(path), _token(path), _memory(given, migration.config, machine), *_left_to_do(given, migration)]
    if try_out is not None:
        checks.append(_tried(migration.config, try_out))
    return Migrated(migration, tuple(checks), dump_plain(migration.config))


def _is_same(old: str, new: str) -> bool:
    """Whether two names, or two paths of one folder, mean the same model."""
    return old == new or (Path(old).is_dir() and Path(new).is_dir() and os.path.samefile(old, new))


def _access(path: str) -> Check:
    if looks_local(path) or Path(path).is_dir():
        return Check("license accepted", "unasked", f"{path} is a local folder, so the hub was not asked")
    return Check("license accepted", "done", f"the hub gives you access to {path}")


def _token(path: str) -> Check:
    if looks_local(path) or Path(path).is_dir():
        return Check("access token", "done", "not needed for a folder")
    if is_signed_in():
        return Check("access token", "done", "stored, or set in the environment")
    return Check("access token", "open", "none stored; a gated model needs one: `hf auth login`")


def _memory(old: Mapping[str, Any], new: Mapping[str, Any], machine: hardware.Hardware | None) -> Check:
    """Compare forecasts of one optimizer step, as in `surefoot plan`."""
    what = "memory for a step"
    before = _planned(old, machine)
    was = f"before {size_text(before.memory.total)}, now " if before else ""
    try:
        plan = _plan(check_config(new), machine)
    except InputError as error:
        memory = [fault for fault in error.faults if fault.where == "model"]
        if not memory or len(memory) < len(error.faults):
            raise
        return Check(what, "failed", f"{memory[0].what}; {memory[0].fix}")
    room = f"{size_text(usable(plan.memory.available))} usable on {plan.device.reason}"
    said = (
        f"{was}{size_text(plan.memory.total)} at {counted(plan.batch.micro.value, 'example')} per micro-batch; {room}"
    )
    if fits(plan.memory):
        return Check(what, "done", said)
    return Check(what, "failed", f"{said}: add an adapter, keep the base in 16 bits, or shard it over processes")


def _planned(config: Mapping[str, Any], machine: hardware.Hardware | None) -> RunPlan | None:
    """The plan of a config; None if the old model or its data are not available, so there is nothing to compare."""
    if not Path(str(value_at(config, "model.path"))).is_dir():
        return None  # do not download a hub model only for a comparison
    try:
        return _plan(check_config(config), machine)
    except SurefootError:
        return None


def _plan(config: RunConfig, machine: hardware.Hardware | None) -> RunPlan:
    """Plan with the data, because micro-batches, and so the memory, depend on the lengths of examples."""
    from surefoot.runs.make_plan import make_plan
    from surefoot.runs.plan_with_data import plan_with_data

    return plan_with_data(config)[0] if machine is None else make_plan(config, hardware=machine)


def _left_to_do(given: Mapping[str, Any], migration: Migration) -> list[Check]:
    """Checks that only the user can make."""
    old = _layers_of(given)
    mention = f" that says {old}" if old else " that names modules of the old model"
    later = "watch grad_norm and peak_memory in trainer_log.jsonl; lower optim.lr if the loss jumps"
    return [
        *(Check("to do", "open", note) for note in migration.notes),
        Check("your own code", "open", f"check code{mention}"),
        Check("during training", "open", later),
    ]


def _layers_of(given: Mapping[str, Any]) -> str:
    """Path of the old family's decoder layers, if the old model's config is available."""
    folder = Path(str(value_at(given, "model.path")))
    if not (folder / "config.json").is_file():
        return ""
    structure = facts_of(folder).structure
    return f"{structure.layers}." if structure else ""


def _tried(config: Mapping[str, Any], console: Console) -> Check:
    """Run a few steps on a few records, in a temporary folder."""
    from surefoot.runs.run import train_run

    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder:
        plain = {**config, "output": f"{folder}/run", "duration": f"{_TRIED_STEPS} steps"}
        plain["data"] = {**config["data"], "max_samples": _TRIED_RECORDS}
        plain["batch"] = {**config.get("batch", {}), "size": 2}
        try:
            train_run(check_config(plain), "new", console)
        except SurefootError as error:
            fault: Fault = error.faults[0]
            return Check("a small test run", "failed", str(fault))
    return Check("a small test run", "done", f"{_TRIED_STEPS} steps on {_TRIED_RECORDS} records, all finite")
