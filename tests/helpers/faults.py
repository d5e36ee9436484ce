"""Assert faults by code, place and values. Only tests/golden/messages quotes the wording.

    with raises_fault("SF-DATA-ROW", f"{path}:3"):
        read(path)
    assert prints_fault(result.stderr, "SF-DATA-ROW", f"{path}:3")
    assert refused_settings(lambda: translate_file("run.json", text, [], Options()), text=text) == ["lora_rank"]

`test_faults.py` in this folder shows what they reject.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from surefoot.system.errors import Fault, InputError, SurefootError

_IN_A_FILE = re.compile(r".+?:(\d+)(?::(\d+))?")


@contextmanager
def raises_fault(
    code: str,
    where: object,
    *values: object,
    remedy: Sequence[object] = (),
    also: Sequence[tuple[object, ...]] = (),
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Assert that the block raises a SurefootError with exactly this fault, followed by those of `also`.

    code: code of the fault, "SF-...".
    where: its complete place.
    values: numbers and names that its message contains, each as a whole and without a space.
    remedy: numbers and names that its fix contains.
    also: (code, place, *values) of each further fault, in order.
    """
    with pytest.raises(SurefootError) as caught:
        yield caught
    faults = caught.value.faults
    expected = [(code, where, *values), *also]
    assert [(fault.code, fault.where) for fault in faults] == [(one[0], str(one[1])) for one in expected], caught.value
    assert "\n" not in "".join(map(str, faults)), faults
    missing = [
        value for fault, one in zip(faults, expected, strict=True) for value in one[2:] if not gives(fault.what, value)
    ]
    missing += [value for value in remedy if not gives(faults[0].fix, value)]
    assert not missing, faults


def prints_fault(text: str, code: str, where: object, *values: object) -> bool:
    """Whether the command line printed exactly this fault and no other, in a line "error: PLACE: … [CODE]".

    text: the output of the command.
    where: the place; for a key of a config file everything before the message, "FILE:LINE:COLUMN: error: KEY".
    values: numbers and names in the line.
    """
    (line,) = [line for line in text.splitlines() if re.search(r" \[SF-[A-Z-]+\]$", line)]
    message = line.removeprefix("error: ")
    return (
        message.startswith(f"{where}: ")
        and message.endswith(f" [{code}]")
        and all(gives(message.removeprefix(f"{where}: "), value) for value in values)
    )


def gives(text: str, value: object) -> bool:
    """Whether a text contains a number or name as a whole: 3 is not in "13" or "3.5", `bias` not in "p1.bias"."""
    assert not (isinstance(value, str) and " " in value), f"{value!r} is a sentence, not a value"
    return re.search(rf"(?<![\w./])(?<!\d,){re.escape(str(value))}(?!\w|[.,]\d|[./]\w)", text) is not None


def lines_giving(text: str, *values: object) -> list[str]:
    """The lines of a text that hold all these numbers and names."""
    return [line for line in text.splitlines() if all(gives(line, value) for value in values)]


def refused_settings(call: Callable[[], Any], code: str = "SF-TRANSLATE-SETTING", text: str = "") -> list[str]:
    """Return the names of all settings of another tool that `call` refuses, in order.

    code: the code that each fault must have.
    text: the file that the settings are read from. Line and column of a fault must point at its setting; a fault
        without a place is about a setting that the file lacks.
    """
    with pytest.raises(InputError) as caught:
        call()
    assert {fault.code for fault in caught.value.faults} == {code}
    assert [fault for fault in caught.value.faults if not _is_in_place(fault, text)] == []
    return [setting(fault) for fault in caught.value.faults]


def _is_in_place(fault: Fault, text: str) -> bool:
    word = rf"""["']?{re.escape(setting(fault))}["']?\s*:"""
    if not fault.where:
        return re.search(rf"^\W*{word}", text, re.MULTILINE) is None
    if not (place := _IN_A_FILE.fullmatch(fault.where)):
        return True  # a flag, a variable or an override, by which `setting` names it
    line = text.splitlines()[int(place[1]) - 1]
    return place[2] is not None and re.match(word, line[int(place[2]) - 1 :]) is not None


def setting(fault: Fault) -> str:
    """Return the setting of a fault: the flag, variable or override at its place, or as its message names it."""
    if not fault.where or _IN_A_FILE.fullmatch(fault.where):
        return fault.what.partition(": ")[0]
    return fault.where.lstrip("-").partition("=")[0].partition(" ")[0].replace("-", "_")
