"""What surefoot refuses, by code, place and numbers: messages may be reworded without a red test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from surefoot.system.errors import SurefootError


@contextmanager
def refused(code: str, where: object = "", *facts: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Inside, surefoot refuses something, in one line for each fault.

    code: of the fault that is meant.
    where: part of its place; where several are reported, the first that fits both.
    facts: numbers, names and values that its sentence has to give.
    """
    with pytest.raises(SurefootError) as caught:
        yield caught
    faults = caught.value.faults
    fault = next((one for one in faults if one.code == code and str(where) in one.where), None)
    assert fault is not None, [(one.code, one.where) for one in faults]
    assert [fact for fact in facts if str(fact) not in fault.what] == []
    assert str(caught.value).count("\n") == len(faults) - 1
