"""Translate what a script built, by running it up to `Trainer.train()`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.commands.terminal import echo
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.interop.launch import Command, Options
    from surefoot.interop.takeover import Session, Taken
    from surefoot.interop.translation import GivenMode, Translation


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
) -> tuple[Taken, Translation, Path]:
    """Return what was handed over, its translation, and the config file written beside it.

    mode: "resume", "overwrite", or None for what the script itself asks for.
    """
    from surefoot.interop.draft import with_overrides
    from surefoot.interop.takeover import check_taken, translation_of
    from surefoot.interop.translation import as_yaml, in_processes, with_mode
    from surefoot.system import durable

    taken = session.taken()
    check_taken(taken, command.program, dropped)
    mode = mode or taken.mode
    taken, changed = taken.settled(mode)
    if changed:
        echo(f"caution: the script now hands over other {', '.join(changed)}; the run goes on with what it began with")
    found = translation_of(taken, command, options)
    found = with_mode(with_overrides(in_processes(found, command.processes, command.engine), own), mode)
    if found.config.get("adapter", {}).get("publish", "adapter") != "adapter":
        fix = "leave it out; surefoot export merges the adapter afterwards"
        raise InputError(Fault("adapter.publish", "must be adapter: the script goes on with it", fix, "SF-USE-FLAG"))
    path = taken.folder / "surefoot.yaml"
    durable.write_text(path, as_yaml(found))
    return taken, found, path
