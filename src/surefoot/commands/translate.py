"""`surefoot translate`: another tool's config or command line as surefoot YAML, with an account of every setting.

`translate`, `run` and `train` share this code: files that the arguments name are read here, and a script with a Trainer
is run up to `Trainer.train()`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from surefoot.commands.options import with_first_record
from surefoot.commands.terminal import Invocation, echo
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.messages import shown_json

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.interop.launch import Command, Options
    from surefoot.interop.takeover import Session, Taken
    from surefoot.interop.translation import GivenMode, Translation

Handler = TypeVar("Handler", bound=Callable[..., Any])


class WordsCommand(click.Command):
    """A command that passes everything after `--` unparsed, and remembers what stood before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        behind = len(args) - args.index("--") - 1 if "--" in args else None
        left = super().parse_args(ctx, args)
        words = ctx.params.get("words", ())
        ctx.meta[_BEFORE] = None if behind is None else words[: len(words) - behind]
        return left


_BEFORE = "surefoot.before_the_dashes"


def is_command(ctx: click.Context) -> bool:
    """Whether there are words after `--`."""
    return ctx.meta[_BEFORE] is not None


def own_and_command(ctx: click.Context, words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (surefoot's own keys before `--`, the command after it); without `--` all words are the command."""
    own = ctx.meta[_BEFORE] or ()
    return own, words[len(own) :]


def translated_command(ctx: click.Context, words: tuple[str, ...], *, allow_unknown: bool) -> Translation:
    from surefoot.interop.draft import with_overrides
    from surefoot.interop.registry import translate_command

    own, command = own_and_command(ctx, words)
    return with_overrides(translate_command(command, reading_options(allow_unknown=allow_unknown)), own)


def dropping(command: Handler) -> Handler:
    """Decorator: `--drop NAME`, passed as `drop: tuple[str, ...]`."""
    words = "Give up a part of a script that surefoot cannot take over, such as a callback. May be repeated."
    return click.option("--drop", multiple=True, metavar="NAME", help=words)(command)


def trainer_script(words: Sequence[str]) -> Command | None:
    """Return the command that runs a script with a Trainer; None for the commands of known tools and for others."""
    from surefoot.interop.registry import own_script

    return own_script(words, reading_options())


def reading_options(*, allow_unknown: bool = False) -> Options:
    from surefoot.config.yaml_reader import read_text
    from surefoot.interop.launch import Options
    from surefoot.system import hardware, hub, process
    from surefoot.system.locations import is_hub_data

    def read(path: str) -> str:
        return read_text(hub.in_cache(path) or Path(path))

    def newest(run: str) -> str | None:
        from surefoot.training.checkpoint import newest_verified

        checkpoint, _ = newest_verified(Path(run))
        return checkpoint.folder.name if checkpoint else None

    def first(path: str) -> Mapping[str, Any] | None:
        from surefoot.data.sources.resolve import SourceSpec, first_record

        try:
            return None if is_hub_data(path) else first_record(SourceSpec(path))
        except (SurefootError, OSError):
            return None  # the run reports what is wrong with it

    folder = Path.cwd().as_posix()
    environment = process.launch_environment()
    return Options(allow_unknown, hardware.accelerators(), read, environment, newest, folder, first, _trained_text)


def _trained_text(config: Mapping[str, Any]) -> str | None:
    """The first record formatted with the tokenizer's own template; downloads nothing."""
    from surefoot.commands.data import plan_tokens
    from surefoot.config.load import check_config
    from surefoot.methods.examples import prepare_examples
    from surefoot.planning.notes import Notes
    from surefoot.runs.load_models import planned_tokenizer

    folder = Path(config["model"]["path"])
    if not folder.is_dir():
        return None
    try:
        one = {**config, "data": {**config["data"], "max_samples": 1, "eval": "none"}}
        checked = with_first_record(check_config(one))
        tokens = plan_tokens(checked, folder, Notes())
        prepared = prepare_examples(checked, tokens, planned_tokenizer(folder, tokens))
    except (SurefootError, OSError):
        return None  # the run reports what is wrong
    return "".join(part.text for part in prepared.audit.samples[0].parts)


def recognized(config: Path, overrides: Sequence[str]) -> Translation | None:
    """Translate another tool's file; return None for surefoot's own and for unknown files."""
    from surefoot.config.load import is_run_config
    from surefoot.config.yaml_reader import read_text

    if not config.is_file():
        return None  # the config reader reports what is wrong
    try:
        text = read_text(config)
    except SurefootError:
        return None
    if config.suffix != ".py" and is_run_config(text):
        return None  # the usual case, without importing the dialects
    from surefoot.interop.registry import file_tool, translate_file

    if file_tool(str(config), text) is None:
        return None
    return translate_file(str(config), text, overrides, reading_options())


def with_command(text: str, typed: Sequence[str]) -> str:
    """Adapt advice that mentions --resume or --overwrite to another tool's command."""
    if "--" not in typed:
        return text
    program = next((word for word in typed[typed.index("--") + 1 :] if "=" not in word), "…")
    return re.sub(r"--resume|--overwrite", lambda found: f"`surefoot run {found[0]} -- {program} …`", text)


def checked(translation: Translation) -> RunConfig:
    """Check the surefoot config of a translation. Its faults, now and later, point at the original settings."""
    from surefoot.config.load import check_config

    show_at_words(translation)
    os.environ.update(translation.environment)  # before torch looks for devices
    return with_first_record(check_config(translation.config))


def show_at_words(translation: Translation) -> None:
    """Make later faults about a surefoot key point at the setting that it came from."""
    from surefoot.interop.translation import locate, with_tool_settings

    invocation = click.get_current_context().ensure_object(Invocation)

    def at_its_word(fault: Fault) -> Fault:
        found = locate(translation, fault)
        found = replace(found, fix=with_tool_settings(translation, found.fix))
        return replace(found, fix=with_command(found.fix, invocation.typed)) if fault.where == "output" else found

    invocation.locate = at_its_word


def values_checked(translation: Translation) -> None:
    """Raises InputError for values that `surefoot train` would refuse; paths are not checked, since they may be another
    machine's."""
    from surefoot.config.load import check_config

    show_at_words(translation)
    check_config(translation.config, files=False)


@click.command(cls=WordsCommand, context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, required=True, metavar="FILE [KEY=VALUE]... | [KEY=VALUE]... -- COMMAND...")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the YAML to this new file.")
@click.option("--json", "as_json", is_flag=True, help="Print the config and the account of settings as JSON.")
@click.option(
    "--allow-unknown", is_flag=True, help="List arguments that the tool does not know instead of refusing them."
)
@dropping
@click.pass_context
def translate(
    ctx: click.Context,
    words: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    allow_unknown: bool,
    drop: tuple[str, ...],
) -> None:
    """Translate a config of another tool, or a command after --, and list what was carried over and what was not.

    surefoot translate examples/llama3_lora_sft.yaml lora_rank=16

    surefoot translate -- llamafactory-cli train --stage sft --do_train ...

    KEY=VALUE after a file are the tool's settings; before -- they are keys of surefoot.
    """
    from surefoot.interop.registry import translate_file
    from surefoot.interop.translation import as_yaml, to_json

    own, command_words = own_and_command(ctx, words)
    if is_command(ctx) and (command := trainer_script(command_words)) is not None:
        found = translate_script(command_words, command, reading_options(allow_unknown=allow_unknown), own, drop)
    elif is_command(ctx):
        found = translated_command(ctx, words, allow_unknown=allow_unknown)
    else:
        options = reading_options(allow_unknown=allow_unknown)
        found = translate_file(words[0], options.read(words[0]), words[1:], options)
    if found.config:
        values_checked(found)
    if as_json:
        shown = shown_json({"config": found.config, **to_json(found)}, default=str)
    else:
        shown = as_yaml(found).rstrip("\n")
    if out is None:
        echo(shown)
        return
    if out.exists():
        raise InputError(Fault(str(out), "already exists", "name another file, or remove it", code="SF-USE-OUTPUT"))
    from surefoot.interop.translation import summary
    from surefoot.system import durable

    durable.write_text(out, f"{shown}\n")
    echo(f"{out}: {summary(found)}")


def translate_script(
    words: Sequence[str], command: Command, options: Options, own: Sequence[str], dropped: Sequence[str]
) -> Translation:
    """Run the script until it calls train(), and return the config for what it built; its data and model are stored."""
    from surefoot.interop.takeover import Session

    with Session(words, command, to_stderr=True) as session:
        return translated(session, command, options, own, dropped, None)[1]


def translated(
    session: Session,
    command: Command,
    options: Options,
    own: Sequence[str],
    dropped: Sequence[str],
    mode: GivenMode | None,
    *,
    compared: bool = False,
) -> tuple[Taken, Translation, Path]:
    """Return what was handed over, its translation, and the config file written beside it.

    mode: "resume", "overwrite", or None for what the script itself asks for.
    compared: its loss will be compared with surefoot's.
    """
    from surefoot.interop.draft import with_overrides
    from surefoot.interop.launch import in_processes
    from surefoot.interop.takeover import check_taken, translation_of
    from surefoot.interop.translation import as_yaml, with_mode
    from surefoot.system import durable

    taken = session.taken()
    check_taken(taken, command.program, dropped, compared=compared)
    mode = mode or taken.mode
    taken, changed = taken.settled(mode)
    if changed:
        echo(f"caution: the script now hands over other {', '.join(changed)}; the run goes on with what it began with")
    found = translation_of(taken, command, options)
    found = with_mode(with_overrides(in_processes(found, command), own), mode)
    if found.config.get("adapter", {}).get("publish", "adapter") != "adapter":
        fix = "leave it out; surefoot export merges the adapter afterwards"
        raise InputError(Fault("adapter.publish", "must be adapter: the script goes on with it", fix, "SF-USE-FLAG"))
    path = taken.folder / "surefoot.yaml"
    durable.write_text(path, as_yaml(found))
    return taken, found, path
