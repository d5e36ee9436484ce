"""Checks before the harness is used; a separate module, because they need no torch."""

from __future__ import annotations

from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.libraries import is_installed


def require_harness() -> None:
    """Raises EnvironmentFault if lm-eval is not installed."""
    if not is_installed("lm_eval"):
        fix = "pip install 'surefoot[eval]'"
        raise EnvironmentFault(
            Fault("surefoot evaluate harness", "needs the package lm-eval, which is missing", fix, code="SF-PACKAGE")
        )


def task_names(written: str) -> tuple[str, ...]:
    """Parse the names in --tasks."""
    names = tuple(name.strip() for name in written.split(",") if name.strip())
    if not names:
        raise InputError(Fault("--tasks", "names no task", "write it like arc_easy,piqa", code="SF-EVALUATE"))
    return names
