"""`surefoot`: the command group. A command's module is imported only when that command is called.

The help texts are in the table below, so `surefoot --help` imports click and nothing else. `LazyGroup.main` turns every
error into lines on stderr and an exit code. A command may return its exit code; None means 0.

Shell completion is click's; `surefoot completion` prints the script.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any, NamedTuple

import click

from surefoot.commands.terminal import (
    BUG_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    Invocation,
    report_bug,
    report_error,
    report_usage,
)
from surefoot.system.errors import SurefootError, is_panic
from surefoot.system.messages import nearest_word


class Entry(NamedTuple):
    """A command's module and its line in the list of commands. trains: whether it takes or forecasts training steps,
    and so restarts the process with the memory settings of a run."""

    module: str
    help: str
    trains: bool = False


COMMANDS = {
    "quickstart": Entry(
        "surefoot.commands.quickstart.command", "Train a tiny model offline and see it learn.", trains=True
    ),
    "init": Entry("surefoot.commands.init", "Write a commented config for a model and data."),
    "train": Entry(
        "surefoot.commands.train", "Fine-tune a model as a config describes; resumable at any time.", trains=True
    ),
    "plan": Entry("surefoot.commands.plan", "Show every choice of a run with its reason; trains nothing.", trains=True),
    "doctor": Entry(
        "surefoot.commands.doctor.command", "Find what makes a machine or a run slow or wrong.", trains=True
    ),
    "tune": Entry(
        "surefoot.commands.tune.command", "Find the fastest settings of a run by short real trials.", trains=True
    ),
    "data": Entry("surefoot.commands.data", "Show what the model would learn from, token by token."),
    "teach": Entry("surefoot.commands.teach", "Store a teacher's distributions, to distill without it."),
    "generate": Entry("surefoot.commands.generate", "Answer prompts with a base model, an adapter or a run."),
    "chat": Entry("surefoot.commands.generate", "Talk to a base model, an adapter or a run."),
    "verify": Entry("surefoot.commands.verify", "Check a run or checkpoint bit by bit, or compare two."),
    "replay": Entry("surefoot.commands.replay", "Repeat a failed step and say whether it fails again.", trains=True),
    "compare": Entry("surefoot.commands.compare", "Show how two runs differ: settings, machine, curves."),
    "board": Entry("surefoot.commands.board.server", "Watch the runs of a folder on a live local page."),
    "evaluate": Entry("surefoot.commands.evaluate", "Measure a model: loss, commonsense sets, harness tasks."),
    "capture": Entry("surefoot.commands.capture", "Store what a model's layers hold and compute; compare two."),
    "export": Entry("surefoot.commands.export", "Write a trained model for other programs, merged and proven equal."),
    "convert": Entry("surefoot.commands.convert", "Turn weights in any known layout into a normal folder, or back."),
    "push": Entry("surefoot.commands.push", "Upload the model of a finished run to the hub, privately."),
    "translate": Entry("surefoot.commands.translate", "Show another tool's config or command as a surefoot config."),
    "run": Entry("surefoot.commands.run", "Run another tool's command with surefoot.", trains=True),
    "migrate": Entry("surefoot.commands.migrate", "Rewrite a config for a model of another family."),
    "compat": Entry("surefoot.commands.compat", "Write scripts with the names that other tools use."),
    "explain": Entry("surefoot.commands.keys", "Explain a config key or an error code; list all keys."),
    "schema": Entry("surefoot.commands.keys", "Print the JSON Schema of the config, for editors."),
    "completion": Entry("surefoot.commands.keys", "Print the completion script of a shell."),
}


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Invocation).debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_remember_debug,
        help="Show the traceback of an error.",
    )


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    for name in ("surefoot", "torch", "transformers", "peft"):
        click.echo(f"{name} {metadata.version(name)}")
    click.echo(f"python {sys.version.split()[0]}")
    ctx.exit()


class LazyGroup(click.Group):
    """A command group built from a table. `--debug` works before and after the command's name."""

    def __init__(self, table: Mapping[str, Entry], **settings: Any):
        super().__init__(**settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        if cmd_name not in self.commands:
            command: click.Command = getattr(import_module(self.table[cmd_name].module), cmd_name)
            command.params.append(_debug_option())
            self.commands[cmd_name] = command
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.table or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if "train" in self.table and name == "report":  # users expect a command of this name
            what = (
                "no such command: report. The report of a run is report.html in its folder; `surefoot board` shows it"
            )
            raise click.UsageError(what, ctx)
        config = "train" in self.table and name.endswith((".yaml", ".yml"))
        near = f"train {name}" if config else nearest_word(name, self.table)
        advice = f" Did you mean `{ctx.command_path} {near}`?" if near else ""
        raise click.UsageError(f"no such command: {name}.{advice}", ctx)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run and exit with the resulting code. standalone_mode=False: return or raise, as click does."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of failing
        typed = args[0] if args else extra.pop("args", None)
        words = list(sys.argv[1:] if typed is None else typed)
        command = next((self.table[word] for word in words if word in self.table), None)
        if typed is None and command is not None and command.trains:  # called as a program
            from surefoot.system import process

            process.restart_without_thread_cache()
        # The invocation is made here because usage errors, raised before any command runs, quote what was typed.
        invocation = Invocation(typed=tuple(words))
        sys.exit(self._outcome(invocation, words, *args[1:], **extra))

    def _outcome(self, invocation: Invocation, words: list[str], *args: Any, **extra: Any) -> int:
        try:
            code = super().main(words, *args, standalone_mode=False, obj=invocation, **extra)
            _flush_stdout()
            return code if isinstance(code, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except click.ClickException as error:
            report_usage(error, invocation)
            return error.exit_code
        except click.Abort:  # Ctrl-C, or the end of input at a prompt
            return INTERRUPTED_EXIT_CODE
        except SurefootError as error:
            report_error(error, invocation)
            return error.exit_code
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            from surefoot.system.libraries import torchvision_fault

            if (known := torchvision_fault(error)) is not None:
                report_error(known, invocation)
                return known.exit_code
            report_bug(error, invocation)
            return BUG_EXIT_CODE


def _flush_stdout() -> None:
    """Flush; a closed pipe (`surefoot explain | head`) is no error, but Python would report one at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


main = LazyGroup(
    COMMANDS,
    name="surefoot",
    help="Fine-tune language models without losing your footing: no NaNs, no drift, no guesswork.",
    epilog="Exit codes: 0 done, 1 a bug in surefoot, 2 input, 3 environment, 4 no checkpoint that verifies, "
    "5 diverged, 6 not reproduced, 75 resumable, 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the versions of surefoot and its main dependencies.",
        ),
        _debug_option(),
        # The deepspeed launcher passes it before the command; the engine reads the rank itself when it starts.
        click.Option(["--local_rank"], type=int, hidden=True, expose_value=False),
    ],
)
