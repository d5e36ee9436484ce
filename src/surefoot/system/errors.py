"""Errors by cause, each with its exit code.

Every error that a user can meet is a `SurefootError`. The command line prints its faults, one line each, and exits with
its code; the traceback appears only with `--debug`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NO_MEMORY = "SF-MEMORY"  # code of faults about memory, forecast or actual


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    where: the place: "file:line:column", a dotted key, a tensor name.
    what: what is wrong there.
    fix: what to do about it; may be empty if `what` already says it.
    code: the kind of problem, a key of `surefoot.system.error_codes.CODES`.
    """

    where: str
    what: str
    fix: str = ""
    code: str = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}; {self.fix}" if self.fix else line


class SurefootError(Exception):
    """A failure with an exit code and one line per fault. Raise a subclass."""

    exit_code = 1

    def __init__(self, faults: Fault | str | Sequence[Fault]):
        if isinstance(faults, str):
            faults = Fault("", faults)
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class InputError(SurefootError):
    """Wrong user input: config, data, model files or flags."""

    exit_code = 2


class EnvironmentFault(SurefootError):
    """A problem of the environment: disk, device, memory, network, access to the hub."""

    exit_code = 3


class IntegrityError(SurefootError):
    """No checkpoint verifies, or it does not belong to this run."""

    exit_code = 4


class Diverged(SurefootError):
    """The run diverged: the loss, gradients or moments stayed non-finite."""

    exit_code = 5


class NothingLearned(SurefootError):
    """The run finished but learned nothing, so nothing is published."""

    exit_code = 7


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust panicked. A panic is not an Exception, so `except Exception` misses it."""
    return type(error).__module__ == "pyo3_runtime"


NOT_REPRODUCED_EXIT_CODE = 6  # a replay that does not reproduce the recorded failure
STOPPED_EXIT_CODE = 75  # stopped early and resumable (EX_TEMPFAIL: "try again later")
