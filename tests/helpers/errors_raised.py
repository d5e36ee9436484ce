"""Errors by their code and place, whatever their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from surefoot.system.errors import SurefootError


@contextmanager
def raises_code(code: str, where: str | None = None, *, naming: str = "") -> Iterator[Any]:
    """The block raises an error whose first fault has this code.

    code: of the fault, "SF-…".
    where: the end of its place; None: any place.
    naming: names that its remedy lists, as it lists them.
    """
    with pytest.raises(SurefootError) as caught:
        yield caught
    fault = caught.value.faults[0]
    assert fault.code == code, fault
    assert naming in fault.fix, fault
    assert where is None or fault.where.endswith(where), fault
