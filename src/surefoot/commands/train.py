"""`surefoot train`: a whole run, or with `--check N` a few steps to see whether it learns."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import Invocation, echo, screen
from surefoot.commands.translate import checked, recognized, with_command
from surefoot.system import durable, process
from surefoot.system.errors import STOPPED_EXIT_CODE
from surefoot.system.libraries import require_deepspeed
from surefoot.system.messages import first_few
from surefoot.system.redaction import veiled_words

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.interop.translation import GivenMode, Translation
    from surefoot.runs.output_folder import Mode


Command = TypeVar("Command", bound=Callable[..., Any])
_LEAST = 2  # steps; a trend needs two


def checking(command: Command) -> Command:
    """Decorator: `--check N`, passed as `check: int | None`."""
    words = (
        "Take N steps, report whether losses and gradients are finite and the loss falls, then stop. Writes nothing."
    )
    return click.option("--check", type=click.IntRange(min=_LEAST), metavar="N", help=words)(command)


def check_run(config: RunConfig, steps: int, origin: Translation | None = None) -> int:
    """Return 0, or the exit code with which the run would fail. origin: the translation, if another tool's config was
    read."""
    console = screen()
    console.say(f"{steps} steps of {config.model.path}, at the peak learning rate; nothing is written …")
    from surefoot.commands.doctor.command import advice, doctor_table
    from surefoot.commands.doctor.findings import Examination
    from surefoot.commands.doctor.steps import check_steps
    from surefoot.interop.translation import with_tool_settings

    examination = Examination(check_steps(config, steps, console.say), {})
    console.show(doctor_table(examination))
    for line, style in advice(examination):
        console.say(with_tool_settings(origin, line) if origin else line, style=style)
    return examination.exit_code


@dataclass(frozen=True)
class TrainFlags:
    """The flags of `train`, and of `run` for a training command.

    mode: None if neither --resume nor --overwrite is given.
    quiet: print only errors.
    full: print the whole plan and data audit.
    push: [OWNER/]NAME on the hub to upload the finished model to.
    profile: number of steps to profile.
    time_every: print forward and backward times every so many steps.
    dry_run: plan and read the data without creating the run folder.
    check: number of steps to take and judge, writing nothing.
    """

    mode: GivenMode | None = None
    quiet: bool = False
    full: bool = False
    push: str | None = None
    profile: int | None = None
    time_every: int | None = None
    dry_run: bool = False
    check: int | None = None


def chosen_mode(resume: bool, overwrite: bool) -> GivenMode | None:
    """Return the mode for --resume and --overwrite. Raises click.UsageError if both are given."""
    if resume and overwrite:
        raise click.UsageError("--resume continues a run and --overwrite replaces it: give only one of them")
    return "resume" if resume else "overwrite" if overwrite else None


@click.command()
@config_arguments
@click.option(
    "--resume", is_flag=True, help="Continue from the newest checkpoint that verifies, or start if there is none."
)
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors; run.log has everything.")
@click.option("-v", "--plan", "full", is_flag=True, help="Show the whole plan and data audit instead of a summary.")
@click.option("--push", metavar="[OWNER/]NAME", help="Upload the finished model to the hub, as a private repository.")
@click.option(
    "--profile",
    type=click.IntRange(min=1),
    metavar="N",
    help="After a warm-up, time N steps and trace two more: table, picture, trace for Perfetto.",
)
@click.option(
    "--time-every", type=click.IntRange(min=1), metavar="N", help="Print forward and backward times every N steps."
)
@click.option("--dry-run", is_flag=True, help="Plan, read the data and stop, without creating the run folder.")
@checking
def train(config: Path, overrides: tuple[str, ...], resume: bool, overwrite: bool, **flags: Any) -> int:
    """Fine-tune the model that CONFIG.yaml describes.

    Any key can be overridden: surefoot train run.yaml optim.lr=1e-4 precision=bf16

    A config of another tool is recognized and translated; surefoot translate shows the result.
    """
    given = TrainFlags(mode=chosen_mode(resume, overwrite), **flags)
    translation = recognized(config, overrides)
    if translation is None:
        return _check_or_launch(load_or_exit(config, overrides).config, given)
    if translation.command != "train":
        advice = f"`surefoot translate {config}` prints the command"
        raise click.UsageError(f"{config} is for {translation.command}, not for training; {advice}")
    return train_translation(translation, given, f"surefoot translate {config}")


def train_translation(
    translation: Translation, flags: TrainFlags, account: str = "surefoot translate -- COMMAND"
) -> int:
    """Train from another tool's config or command.

    flags: values that are None are taken from the translated arguments.
    account: what shows the account of its settings, a command or a file.
    """
    words = translation.arguments
    translated = {
        "mode": chosen_mode("--resume" in words, "--overwrite" in words),
        "push": _value_after("--push", words),
        "profile": int(_value_after("--profile", words) or 0) or None,
        "time_every": int(_value_after("--time-every", words) or 0) or None,
    }
    flags = replace(flags, **{name: value for name, value in translated.items() if getattr(flags, name) is None})
    return _check_or_launch(checked(translation), flags, translation, account)


def _value_after(flag: str, words: Sequence[str]) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def _check_or_launch(config: RunConfig, flags: TrainFlags, origin: Translation | None = None, account: str = "") -> int:
    """Return the exit code. origin: the translation, if another tool's config or command was read."""
    if flags.check is not None:
        return check_run(config, flags.check, origin)
    mode = flags.mode or "new"
    with _explained_interruption(Path(config.output), mode):
        return _launch(config, mode, flags, origin, account)


def _launch(config: RunConfig, mode: Mode, flags: TrainFlags, origin: Translation | None, account: str) -> int:
    if config.parallel.engine == "deepspeed" and not flags.dry_run:
        require_deepspeed()  # before anything is planned, read or started
    launch = process.find_launch()
    is_rank_0, count = launch is None or launch.rank == 0, config.parallel.nproc or 1
    with open(os.devnull, "w", encoding="utf-8") if flags.quiet or not is_rank_0 else nullcontext(sys.stdout) as stream:
        from surefoot.report.console import open_console

        console = open_console(stream, process.terminal_wishes(), full=flags.full or flags.dry_run)
        if origin is not None:
            console.say(_read_as(origin, account))
        commits = None
        if launch is None:  # surefoot's launcher did both; under torchrun rank 0 checks as it prepares
            from surefoot.report.library_messages import captured_libraries
            from surefoot.runs.precheck import check_before_torch

            machines = process.find_machines(config.parallel.machines) if config.parallel.machines > 1 else None
            console.say(_beginning(config))
            if machines is None or machines.index == 0:  # the others would find the folder that machine 0 has made
                with captured_libraries(console):
                    commits = check_before_torch(config, mode, dry_run=flags.dry_run)
            else:
                console.say(
                    f"machine {machines.index} of {machines.count}: {machines.address}, machine 0, prints the run"
                )
            if count > 1 or machines is not None:
                from surefoot.commands.launching import start_ranks

                typed = click.get_current_context().ensure_object(Invocation).typed
                return start_ranks(count, typed, Path(config.output), machines)
        else:
            process.quiet_sockets()
            if launch.parent is not None:
                process.end_with(launch.parent)
        with process.without_collecting():
            from surefoot.runs.profiling import ProfileOptions
            from surefoot.runs.run import RunOptions, train_run

        push = flags.push if is_rank_0 else None
        if push is not None:
            from surefoot.commands.push import check_push

            check_push(config, push)
        options = RunOptions(
            typed=_typed(origin),
            dry_run=flags.dry_run,
            profile=ProfileOptions(flags.time_every, flags.profile),
            origin=origin,
            commits=commits,
        )
        code = train_run(config, mode, console, options)
        if push is not None and code == 0 and not flags.dry_run:
            from surefoot.commands.push import push_run

            console.say(f"pushed: {push_run(Path(config.output), push, public=False)}")
        return code


def _beginning(config: RunConfig) -> str:
    """The first line on the screen, printed before anything slow."""
    train = config.data.train
    data = first_few([source.name or Path(source.path).name for source in train], 2)
    base = Path(config.model.path)
    model = base.name if base.is_dir() else config.model.path
    return f"{config.stage} of {model} on {data}, into {config.output}: checking, then loading libraries …"


def _typed(origin: Translation | None) -> list[str]:
    """The command line, for the resume hint. Includes the environment variables that another tool's command read, so
    that it works in another shell."""

    words = list(click.get_current_context().ensure_object(Invocation).typed)
    if origin is not None and "--" in words:
        at = words.index("--") + 1
        own = process.launch_environment()
        assignments = [f"{name}={value}" for name, value in origin.environment.items() if own.get(name) == value]
        words[at:at] = [word for word in assignments if word not in words]
    return ["surefoot", *veiled_words(words)]  # without secrets: run.log stores it


def _read_as(origin: Translation, account: str) -> str:
    from surefoot.interop.translation import summary

    return f"settings of {origin.tool}, translated; {summary(origin)}: {account} shows them"


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which a scheduler sends before it takes the machine."""


@contextmanager
def _explained_interruption(folder: Path, mode: Mode) -> Iterator[None]:
    """Explain an interruption outside of the training loop, which handles Ctrl-C and SIGTERM itself by stopping after
    the step. After SIGTERM the exit code always says that the run can be resumed."""
    before = _listing(folder)
    try:
        with raised_on_sigterm():
            yield
    except KeyboardInterrupt as interruption:
        if _listing(folder) == before:
            step = "the next step" if mode == "resume" else "step 1"
            echo(f"\ninterrupted before {step}; nothing was written", err=True)
        else:
            advice = with_command("continue with --resume", click.get_current_context().ensure_object(Invocation).typed)
            echo(f"\ninterrupted while writing {folder}; {advice}", err=True)
        if isinstance(interruption, Terminated):
            raise click.exceptions.Exit(STOPPED_EXIT_CODE) from None
        raise


@contextmanager
def raised_on_sigterm() -> Iterator[None]:
    """Raise Terminated on SIGTERM inside the block. Not with several ranks: one waiting in a collective could not
    react, so there the signal ends the processes directly."""
    if threading.current_thread() is not threading.main_thread() or process.find_launch() is not None:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _listing(folder: Path) -> dict[str, int]:
    """Modification time of each file of the run."""
    if not folder.is_dir():
        return {}
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if not durable.is_temporary(path)}
