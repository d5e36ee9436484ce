"""Errors that tests expect, by code, place and facts: their wording stands in the gallery of messages alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from surefoot.system.errors import SurefootError


@contextmanager
def raises_fault(
    code: str, where: object = "", *facts: object, naming: str = ""
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise a SurefootError, in one line for each fault, and one of them this fault.

    code: of the fault, "SF-...".
    where: part of its place.
    facts: numbers, names and values that say what is wrong.
    naming: names that its remedy lists, as it lists them.
    """
    with pytest.raises(SurefootError) as caught:
        yield caught
    faults = caught.value.faults
    fault = next((one for one in faults if one.code == code and str(where) in one.where), None)
    assert fault is not None, [(one.code, one.where) for one in faults]
    assert [fact for fact in facts if str(fact) not in fault.what] == []
    assert naming in fault.fix, fault
    assert str(caught.value).count("\n") == len(faults) - 1
