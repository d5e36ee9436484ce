"""`run_exp` and `export_model` of LLaMA-Factory's Python API, which take the settings as a dictionary."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.commands.run import call_words
from surefoot.system.errors import Fault, InputError


def run_exp(args: Mapping[str, Any] | None = None, callbacks: Sequence[object] | None = None) -> None:
    """Train. Without args, those of the command line. Raises surefoot.errors.SurefootError, also for callbacks."""
    if callbacks:
        fix = "leave them out; surefoot.train takes functions of your own"
        raise InputError(
            Fault("callbacks", "are Trainer's, and surefoot runs another loop", fix, code="SF-TRANSLATE-SETTING")
        )
    _run("train", args)


def export_model(args: Mapping[str, Any] | None = None) -> None:
    """Merge an adapter into its base. Without args, those of the command line."""
    _run("export", args)


def _run(verb: str, args: Mapping[str, Any] | None) -> None:
    words = sys.argv[1:] if args is None else [word for item in args.items() for word in _flag(*item)]
    call_words(["llamafactory-cli", verb, *words])


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return [] if value is None else [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
