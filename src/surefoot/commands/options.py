"""What the commands share: the config file with its overrides, and reading it before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from surefoot.commands.completion import complete_configs, complete_overrides
from surefoot.commands.exits import Invocation

if TYPE_CHECKING:
    from surefoot.config.load import LoadedConfig
    from surefoot.config.schema import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])


def config_arguments(command: Command) -> Command:
    """Decorator: `CONFIG.yaml [KEY=VALUE]...`, passed as `config: Path` and `overrides: tuple[str, ...]`."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
    config = click.argument(
        "config", metavar="CONFIG.yaml", type=click.Path(path_type=Path), shell_complete=complete_configs
    )
    return config(overrides(command))


def load_or_exit(config: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The checked config. Call it before any heavy import: a mistake goes to `main` as InputError, which prints all
    faults and exits with 2. Later errors that name a key of this config are shown at its place in the file."""
    from surefoot.config.load import load_config

    loaded = load_config(config, overrides)
    click.get_current_context().ensure_object(Invocation).locate = loaded.locate
    return replace(loaded, config=with_first_record(loaded.config))


def with_first_record(config: RunConfig) -> RunConfig:
    """With what the first record of its data decides; reading data is heavy, and most configs leave nothing to it."""
    from surefoot.families.templates import BY_RECORD

    if BY_RECORD not in (config.data.template, config.data.train_on):
        return config
    from surefoot.methods.sources import settled

    return settled(config)
