"""`--check N` of `train` and `run`: a few steps of the run, and whether they look like learning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from surefoot.system import process

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.interop.translation import Translation

Command = TypeVar("Command", bound=Callable[..., Any])
_LEAST = 2  # steps; the first alone tells nothing


def checking(command: Command) -> Command:
    """Decorator: `--check N`, passed as `check: int | None`."""
    words = "Take N steps, say whether losses and gradients are sound and the loss falls, and stop; write nothing."
    return click.option("--check", type=click.IntRange(min=_LEAST), metavar="N", help=words)(command)


def check_run(config: RunConfig, steps: int, origin: Translation | None = None) -> int:
    """The exit code: 0, or that of a run that would fail so. origin: the words of another tool that were translated."""
    from surefoot.report.console import open_console

    console = open_console(sys.stdout, process.terminal_wishes())
    console.say(f"{steps} steps of {config.model.path}, at the peak of the learning rate; nothing is written …")
    from surefoot.commands.doctor.check import check_steps
    from surefoot.commands.doctor.findings import Examination
    from surefoot.commands.doctor.table import advice, doctor_table
    from surefoot.interop.account import in_its_words

    found = Examination(check_steps(config, steps, console.say), {})
    console.show(doctor_table(found))
    for line, style in advice(found):
        console.say(in_its_words(origin, line) if origin else line, style=style)
    return found.exit_code
