"""Nothing waits for the disk: `os.fsync` looks whether its handle is open, and returns.

No test cuts the power, and what a killed process has written is there without a flush; so a flush changes nothing that
a test can see, and a tiny run makes a hundred. That everything is flushed, and in the right order, is proven by tests
that stand in the place of the call: tests/system/test_durable.py and tests/faults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TRUE_FSYNC = os.fsync


def _look(handle: Any) -> None:
    """What is no open file is an error, as it is to the call itself."""
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


@contextmanager
def unflushed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _look)
        yield
