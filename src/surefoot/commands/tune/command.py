"""`surefoot tune`: the fastest settings of a run on this machine, found by trying."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import echo_json, screen
from surefoot.system.folders import require_own_picture
from surefoot.system.messages import counted

if TYPE_CHECKING:
    from surefoot.commands.tune.run import Tuned

_FOUND = "{rate:,.0f} real tokens/s, {gain:.2f} times the plan's own choices.\n"
_ABOUT = f"# Found by `surefoot tune` on {{machine}}: {_FOUND}"
_BROKEN_OFF = "# The best so far of a `surefoot tune` that was broken off"


@click.command()
@config_arguments
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the config.  [default: CONFIG-tuned.yaml]")
@click.option(
    "--seconds",
    type=click.FloatRange(0.5),
    default=6.0,
    show_default=True,
    help="Timed part of a trial, about.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was tried as JSON.")
def tune(config: Path, overrides: tuple[str, ...], out: Path | None, seconds: float, as_json: bool) -> int:
    """Search the fastest settings for CONFIG.yaml on this machine with short real trials, and write them as a config.

    What CONFIG.yaml sets stays; what it leaves open is varied. Every setting has to compute what the plain fp32 path
    computes; what the memory forecast rules out is not started. Ctrl-C writes the best so far; the same command goes on
    from there, as it does after a kill.
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
            console.say(f"{own} is in use: what {out.name} trains goes to {output}")
    if not found.finished:
        console.say(
            f"broken off after {counted(len(found.tried), 'setting')}, which {kept} keeps: the same command goes on"
        )
        return STOPPED_EXIT_CODE
    if not as_json:
        elsewhere = [f"output={output}"] if output != own else []
        words = [str(out)] if found.best is not found.start else [str(config), *overrides, *elsewhere]
        console.say(f"next: surefoot train {shlex.join(words)}")
    return 0


def _free_folder(output: str) -> str:
    """Where the tuned run may go: with other settings it is another run, which replaces nothing."""
    from surefoot.runs.output_folder import is_free

    tuned = f"{Path(output)}-tuned"  # without a slash at its end, behind which it would lie in the first run's folder
    names = itertools.chain([output, tuned], (f"{tuned}-{number}" for number in itertools.count(2)))
    return next(name for name in names if is_free(Path(name)))


def _require_free(out: Path) -> None:
    """InputError where there is a file, unless a search that was broken off wrote it."""
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
