"""What torch raises where a form cannot run here, told from what leaves a GPU of no more use to the process.

found, why = attempt(run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """(what it returns, empty) or (None, the first line of why it could not run).

    Raises AcceleratorError: after an illegal memory access every later call fails as well, whoever makes it, and forms
    that are right would be blamed. The process has to end (`surefoot.planning.probes.child`).
    """
    try:
        return run(), ""
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if torch.cuda.is_initialized() and not isinstance(error, torch.OutOfMemoryError):
            torch.cuda.synchronize()  # raises where the same fault came by way of Triton or a library
        return None, (str(error) or type(error).__name__).splitlines()[0]
