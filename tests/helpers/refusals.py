"""What a translation of another tool's words refuses: the settings at fault, by their names.

assert refused(lambda: translate_file("run.json", text, [], Options())) == ["lora_rank"]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.system.errors import Fault, InputError

_IN_A_FILE = re.compile(r".+:\d+(:\d+)?")


def refused(call: Callable[[], Any], code: str = "SF-TRANSLATE-SETTING") -> list[str]:
    """Names of the settings that `call` refuses, in order. code: what each fault must carry."""
    with pytest.raises(InputError) as caught:
        call()
    assert {fault.code for fault in caught.value.faults} == {code}
    return [setting(fault) for fault in caught.value.faults]


def setting(fault: Fault) -> str:
    """A flag, a variable or an override is the place; in a file, or where it is missing, the message names it."""
    if not fault.where or _IN_A_FILE.fullmatch(fault.where):
        return fault.what.partition(": ")[0]
    return fault.where.lstrip("-").partition("=")[0].partition(" ")[0].replace("-", "_")
