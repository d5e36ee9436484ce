"""Runs that are killed in one call of a function, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """What SIGKILL does to a process, as far as the files are concerned: nothing more happens."""


@contextmanager
def killed(owner: Any, name: str, call: int) -> Iterator[None]:
    """Context whose block is killed by the `call`-th call of `owner.name`, counted from 1; fails if it is not."""
    real, calls = getattr(owner, name), 0

    def dies(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return real(*args, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, dies)
        with pytest.raises(Killed):
            yield
