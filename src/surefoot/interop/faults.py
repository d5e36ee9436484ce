"""Build faults for another tool's settings, commands and scripts, each with its error code.

raise setting_error("--lora_r", "expected a number from 1, got 0")
"""

from __future__ import annotations

from surefoot.system.errors import Fault, InputError


def setting_fault(where: str, what: str, fix: str = "") -> Fault:
    """Return a fault for a setting that cannot be translated. Arguments as of `Fault`."""
    return Fault(where, what, fix, code="SF-TRANSLATE-SETTING")


def setting_error(where: str, what: str, fix: str = "") -> InputError:
    """Return `setting_fault` as an error to raise."""
    return InputError(setting_fault(where, what, fix))


def command_error(where: str, what: str, fix: str = "") -> InputError:
    """Return an error to raise for a command or file that no supported tool claims, or that is not supported."""
    return InputError(Fault(where, what, fix, code="SF-TRANSLATE-COMMAND"))


def script_fault(where: str, what: str, fix: str = "") -> Fault:
    """Return a fault for code that cannot be read from the syntax tree. Arguments as of `Fault`."""
    return Fault(where, what, fix, code="SF-TRANSLATE-SCRIPT")


def script_error(where: str, what: str, fix: str = "") -> InputError:
    """Return `script_fault` as an error to raise."""
    return InputError(script_fault(where, what, fix))
