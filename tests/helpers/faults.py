"""Errors that tests expect, by code and place: their wording stands in the gallery of messages alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from surefoot.system.errors import Fault, SurefootError


@contextmanager
def raises_fault(code: str, where: object = None) -> Iterator[list[Fault]]:
    """The block must raise a SurefootError whose first fault has this code and, where given, this place.

    Yields a list that holds the error's faults after the block.
    """
    found: list[Fault] = []
    with pytest.raises(SurefootError) as caught:
        yield found
    found.extend(caught.value.faults)
    assert found[0].code == code
    assert where is None or found[0].where == str(where)
