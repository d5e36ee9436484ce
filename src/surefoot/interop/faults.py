"""Faults in another tool's settings, commands and scripts, each with its code.

raise setting_error("--lora_r", "expected a number from 1, got 0")
"""

from __future__ import annotations

from surefoot.system.errors import Fault, InputError


def setting_fault(where: str, what: str, fix: str = "") -> Fault:
    """A value or name of a setting that cannot be translated. Arguments as of `Fault`."""
    return Fault(where, what, fix, code="SF-TRANSLATE-SETTING")


def setting_error(where: str, what: str, fix: str = "") -> InputError:
    """`setting_fault`, to be raised."""
    return InputError(setting_fault(where, what, fix))


def command_error(where: str, what: str, fix: str = "") -> InputError:
    """A command or file of no tool that surefoot reads, or of a part of one that it does not. To be raised."""
    return InputError(Fault(where, what, fix, code="SF-TRANSLATE-COMMAND"))


def script_fault(where: str, what: str, fix: str = "") -> Fault:
    """A place of a Python script that cannot be read from its syntax tree. Arguments as of `Fault`."""
    return Fault(where, what, fix, code="SF-TRANSLATE-SCRIPT")


def script_error(where: str, what: str, fix: str = "") -> InputError:
    """`script_fault`, to be raised."""
    return InputError(script_fault(where, what, fix))
