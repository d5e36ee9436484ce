"""`run_exp` and `export_model` of LLaMA-Factory's Python API, which take the settings as a dictionary."""

import sys
from collections.abc import Mapping
from typing import Any

from surefoot.cli.main import main


def run_exp(args: Mapping[str, Any] | None = None) -> None:
    """Train. Without args, those of the command line. Ends with SystemExit where the command would fail."""
    _run("train", args)


def export_model(args: Mapping[str, Any] | None = None) -> None:
    """Merge an adapter into its base. Without args, those of the command line."""
    _run("export", args)


def _run(verb: str, args: Mapping[str, Any] | None) -> None:
    words = sys.argv[1:] if args is None else [word for item in args.items() for word in _flag(*item)]
    try:
        main(["run", "--", "llamafactory-cli", verb, *words])
    except SystemExit as ending:
        if ending.code:
            raise


def _flag(name: str, value: Any) -> list[str]:
    return [] if value is None else [f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
