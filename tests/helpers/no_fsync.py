"""Replace `os.fsync` by a check that its handle is open, so that tests do not wait for the disk.

No test cuts the power, and what a killed process has written survives without a flush; so flushes make no difference to
tests, and a tiny run makes a hundred. Tests that replace the call themselves check that everything is flushed in the
right order: tests/system/test_durable.py and tests/faults.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TRUE_FSYNC = os.fsync


def _look(handle: Any) -> None:
    """Raise like the real call if the handle is not an open file."""
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


@contextmanager
def unflushed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _look)
        yield
