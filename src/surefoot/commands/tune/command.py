"""`surefoot tune`: find the fastest settings of a run on this machine by trials."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import FiniteRange, config_arguments, load_or_exit
from surefoot.commands.terminal import echo_json, screen
from surefoot.system.folders import require_own_picture
from surefoot.system.messages import counted

if TYPE_CHECKING:
    from surefoot.commands.tune.run import Tuned

_FOUND = "{rate:,.0f} real tokens/s, {gain:.2f} times the plan's own choices.\n"
_ABOUT = f"# Found by `surefoot tune` on {{machine}}: {_FOUND}"
_BROKEN_OFF = "# The best result of an interrupted `surefoot tune`"


@click.command()
@config_arguments
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the config.  [default: CONFIG-tuned.yaml]")
@click.option(
    "--seconds",
    type=FiniteRange(0.5),
    default=6.0,
    show_default=True,
    help="Approximate length of the timed part of a trial.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all trials as JSON.")
def tune(config: Path, overrides: tuple[str, ...], out: Path | None, seconds: float, as_json: bool) -> int:
    """Search for the fastest settings for CONFIG.yaml on this machine with short real trials, and write them as a
    config.

    Settings in CONFIG.yaml are kept; the others are varied. Every setting must give the same results as the plain fp32
    path; settings that do not fit the memory forecast are not tried. Ctrl-C writes the best result so far; the same
    command continues from there, also after a kill.
    """
    loaded = load_or_exit(config, overrides)
    out = out or config.with_name(f"{config.stem}-tuned.yaml")
    drawn, kept = out.with_suffix(".png"), out.with_name(f"{out.stem}.trials.jsonl")
    _require_free(out)
    require_own_picture(drawn)

    from surefoot.commands.tune.attempt import require_own_journal
    from surefoot.commands.tune.outcome import outcome_lines, picture, trial_line
    from surefoot.commands.tune.run import search_settings
    from surefoot.commands.tune.search import Tried
    from surefoot.config.dump import dump_plain
    from surefoot.system import durable, hardware
    from surefoot.system.errors import STOPPED_EXIT_CODE

    require_own_journal(kept)
    durable.make_folders(out.parent)
    console = screen(err=as_json)
    tried: list[Tried] = []

    def show(one: Tried) -> None:
        tried.append(one)
        console.say(trial_line(len(tried), one, tried[0]))

    found = search_settings(loaded.given, seconds=seconds, on_trial=show, say=console.say, kept=kept)
    about = _ABOUT if found.finished else f"{_BROKEN_OFF} on {{machine}}: {_FOUND}"
    about = about.format(machine=hardware.detect().name, rate=found.best.rate, gain=found.gain)
    own = str(found.config["output"])
    output = _free_folder(own)
    written = {**found.config, "output": output}
    durable.write_text(out, about + dump_plain(written))
    durable.write_bytes(drawn, picture(found.tried, found.start, found.best, config.stem, held_up=found.held_up))
    if as_json:
        echo_json({"config": str(out), **_as_json(found)})
    else:
        for line in outcome_lines(found.tried, found.turns, found.best, found.left_out, held_up=found.held_up):
            console.say(line)
        console.say(f"wrote {out} and {drawn.name}")
        if output != own:
            console.say(f"{own} is in use, so {out.name} writes its run to {output}")
    if not found.finished:
        console.say(
            f"interrupted after {counted(len(found.tried), 'setting')}, stored in {kept}; the same command continues"
        )
        return STOPPED_EXIT_CODE
    if not as_json:
        elsewhere = [f"output={output}"] if output != own else []
        words = [str(out)] if found.best is not found.start else [str(config), *overrides, *elsewhere]
        console.say(f"next: surefoot train {shlex.join(words)}")
    return 0


def _free_folder(output: str) -> str:
    """A folder for the tuned run, which is another run and must not replace the first."""
    from surefoot.runs.output_folder import is_free

    tuned = f"{Path(output)}-tuned"  # Path drops a trailing slash, which would put it inside the first run's folder
    names = itertools.chain([output, tuned], (f"{tuned}-{number}" for number in itertools.count(2)))
    return next(name for name in names if is_free(Path(name)))


def _require_free(out: Path) -> None:
    """Raises InputError if the file exists, unless an interrupted search wrote it."""
    from surefoot.system.errors import Fault, InputError

    if out.is_file() and out.read_bytes().startswith(_BROKEN_OFF.encode()):
        return
    if out.exists():
        raise InputError(Fault(str(out), "already exists", "name another file with --out", code="SF-USE-OUTPUT"))


def _as_json(found: Tuned) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "finished": found.finished,
        "steps": found.steps,
        "held_up": found.held_up,
        "gain": found.gain,
        "start": asdict(found.start),
        "best": asdict(found.best),
        "turns": [asdict(one) for one in found.turns],
        "tried": [asdict(one) for one in found.tried],
        "left_out": [list(one) for one in found.left_out],
    }
