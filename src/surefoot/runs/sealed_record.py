"""A record of the run folder that a later start goes by: JSON with a SHA-256 of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from surefoot.system import plain_files
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.manifest import CHANGED, sealed

T = TypeVar("T")
_FIX = "restore it to resume this run"


def read_sealed(path: Path, meaning: Callable[[dict[str, Any]], T]) -> T:
    """meaning: of the content. Raises IntegrityError where the file is not as it was written."""
    try:
        content = json.loads(plain_files.read_text(path))
        if sealed(content) != content:
            raise IntegrityError(Fault(str(path), CHANGED, _FIX, code="SF-CHECKPOINT-DAMAGED"))
        return meaning(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise IntegrityError(
            Fault(str(path), f"cannot be read ({error})", _FIX, code="SF-CHECKPOINT-DAMAGED")
        ) from None
