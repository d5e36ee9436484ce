"""Arguments and options shared by several commands, with the checks that need no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from surefoot.commands.keys import complete_configs, complete_overrides
from surefoot.commands.terminal import Invocation, echo
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.config.load import LoadedConfig
    from surefoot.config.schema import RunConfig
    from surefoot.methods.open_model import OpenModel
    from surefoot.methods.requests import NamedModel


Command = TypeVar("Command", bound=Callable[..., Any])


def config_arguments(command: Command) -> Command:
    """Decorator: `CONFIG.yaml [KEY=VALUE]...`, passed as `config: Path` and `overrides: tuple[str, ...]`."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
    config = click.argument(
        "config", metavar="CONFIG.yaml", type=click.Path(path_type=Path), shell_complete=complete_configs
    )
    return config(overrides(command))


def load_or_exit(config: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load and check the config; later errors that name one of its keys are shown at their place in the file.

    Call it before any heavy import. Raises InputError with all faults of the config; `main` prints them and exits with
    2.
    """
    from surefoot.config.load import load_config

    loaded = load_config(config, overrides)
    click.get_current_context().ensure_object(Invocation).locate = loaded.locate
    return replace(loaded, config=with_first_record(loaded.config))


def with_first_record(config: RunConfig) -> RunConfig:
    """Resolve the settings that depend on the first data record. Reads the data only if a setting asks for it."""
    from surefoot.families.templates import BY_RECORD

    if BY_RECORD not in (config.data.template, config.data.train_on):
        return config
    from surefoot.methods.sources import settled

    return settled(config)


class FiniteRange(click.FloatRange):
    """A number in a range; click's own takes NaN, which is in every range, and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


_MODEL = (
    click.argument("model"),
    click.option("--adapter", help="Adapter folder to load on top of MODEL."),
)
bos_option = click.option(
    "--bos/--no-bos", default=None, help="Whether to start the text with BOS.  [default: as the model was trained]"
)
_SAMPLING = (
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        help="Maximum length of an answer in tokens.  [default: up to 256]",
    ),
    click.option("--temperature", type=FiniteRange(min=0), default=0.0, help="0 always takes the most likely token."),
    click.option(
        "--top-p",
        type=FiniteRange(min=0, max=1, min_open=True),
        default=1.0,
        help="Sample from the most likely tokens whose probabilities add up to this.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the sampling."),
)


def model_options(command: Command) -> Command:
    """Decorator: MODEL and --adapter."""
    return _apply(_MODEL, command)


def argument_or_option(name: str, help: str, *, required: bool = False) -> Callable[[Command], Command]:
    """Decorator: a value given either as an argument after MODEL or by the option of the same name."""
    shown, option = name.upper(), f"--{name}"

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(**words: Any) -> Any:
            named = words.pop("by_option")
            if named is not None and words[name] is not None:
                raise click.UsageError(f"give {shown} only once: after MODEL or with {option}")
            words[name] = words[name] if named is None else named
            if required and words[name] is None:
                raise click.MissingParameter(param_hint=f"'{shown}'", param_type="argument")
            return command(**words)

        about = f"{help}  [or {shown}, after MODEL]"
        both = click.argument(name, required=False), click.option(option, "by_option", help=about)
        return _apply(both, cast(Command, called))

    return decorate


only_option = click.option("--only", type=click.Choice(["base", "adapter"]), help="Measure only this side.")
_RECORDS = (
    click.option("--template", help="Template for the records.  [default: as the model was trained]"),
    click.option("--max-length", type=click.IntRange(min=2), help="Cut examples to N tokens."),
    click.option("--max-samples", type=click.IntRange(min=1), help="Use only the first N records."),
)


def records_options(command: Command) -> Command:
    """Decorator: how records are formatted and how many are used; the fields of `DataRequest` except its source."""
    return _apply(_RECORDS, command)


def findings_options(files: str) -> Callable[[Command], Command]:
    """Decorator: --json, --out and --overwrite. files: what is written into the --out folder, for the help."""
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON."),
        click.option("--out", type=click.Path(file_okay=False, path_type=Path), help=f"Write {files} here."),
        click.option("--overwrite", is_flag=True, help="Replace findings of a different request in --out."),
    )
    return lambda command: _apply(options, command)


def sampling_options(command: Command) -> Command:
    """Decorator: how tokens are sampled, and how many."""
    return _apply(_SAMPLING, command)


def _apply(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):  # decorators apply from the last to the first
        command = option(command)
    return command


def check_models(
    model: str, adapter: str | None, *, only: str | None = None, max_length: int | None = None
) -> NamedModel | None:
    """Find the folders of a model and check their configs without torch, so that a wrong path fails at once.

    A name that could be a local folder is never looked up on the hub, so a misspelt run starts no download.

    model, adapter: folders or hub ids.
    only: "base" or "adapter" if only that side is measured.
    max_length: example length in tokens that the model must support.

    Returns what the configs say, or None if only loading the model can tell. Raises InputError.
    """
    from surefoot.config.paths import nearest_path
    from surefoot.methods.provenance import require_weights
    from surefoot.methods.requests import named_model, require_positions, require_side
    from surefoot.models.folder import check_folder, require_adapter, resolve_folder
    from surefoot.system.locations import looks_local

    for path, is_adapter in ((model, False), (adapter, True)):
        if path is None:
            continue
        if Path(path).is_file():
            raise InputError(
                Fault(path, "is a file, not a folder", f"give its folder: {Path(path).parent}", code="SF-USE-FOLDER")
            )
        if looks_local(path) and not Path(path).is_dir():
            raise InputError(Fault(path, "no such folder", nearest_path(Path(path), ()), code="SF-FILE-MISSING"))
        folder = resolve_folder(path, weights=True)
        require_weights(folder, path)
        check_folder(folder)
        if is_adapter:
            require_adapter(folder, path)
    named = named_model(model, adapter)
    if named is not None:
        require_side(only, named.adapted)  # pyright: ignore[reportArgumentType]
        require_positions("--max-length", max_length or 1, named.facts.max_positions)
    return named


def check_answers(model: str, adapter: str | None, max_new_tokens: int | None) -> None:
    """Run `check_models`, and check that answers of this length leave room for a prompt."""
    from surefoot.methods.requests import require_room_for_answers

    named = check_models(model, adapter)
    if named is not None and max_new_tokens is not None:
        require_room_for_answers(max_new_tokens, named.facts.max_positions)


def claim_out(file: Path, request: Mapping[str, Any], overwrite: bool, pictures: Sequence[str] = ()) -> None:
    """Check that findings may be written, before anything is measured.

    file: the findings file.
    request: the settings of this request; findings of a different request are replaced only with `overwrite`.
    pictures: names of image files written next to it.

    Raises InputError if `file` holds anything else, EnvironmentFault if it cannot be written.
    """
    from surefoot.system import durable
    from surefoot.system.folders import require_same_request

    require_same_request(file, request, overwrite, pictures)
    durable.require_writable(file.parent)


def introduce(opened: OpenModel, *more: str, template: bool = True) -> None:
    """Print to stderr which model was opened, with its cautions.

    more: further lines.
    template: whether to name the chat template.
    """
    described = opened.described if template else opened.described.partition(", template")[0]
    cautions = [f"caution: {caution}" for caution in opened.cautions]
    echo("\n".join([described, *cautions, *more]), err=True)
