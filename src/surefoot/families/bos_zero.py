"""bos_zero_config.json: a file in the folder of a model that was trained with a scaled BOS embedding.

The format comes from a fork of LLaMA-Factory, whose keys are kept; `scaling_factor` is added, because the original does
not record the factor. Files without it are refused: a model used with another factor than in training gives worse
answers without any error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json
from surefoot.system.errors import Fault, InputError

BOS_FILE = "bos_zero_config.json"
FACTOR = "scaling_factor"


def bos_file(scale: float, global_step: int | None = None) -> dict[str, Any]:
    """Return the content. global_step: only for a checkpoint."""
    content: dict[str, Any] = {
        "add_bos_token": True,
        "zero_bos_embedding": True,
        FACTOR: scale,
        "description": f"The embedding of the first token of every sequence is multiplied by {scale:g}, in training "
        "and in use",
        "trainer_class": "BOSZeroTrainer",
    }
    return content if global_step is None else content | {"global_step": global_step}


def read_bos_scale(folder: Path) -> float | None:
    """Return the factor of the model in `folder`; None if there is no file, or it disables scaling.

    Raises InputError for a file without a valid factor.
    """
    path = folder / BOS_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    if content.get("zero_bos_embedding") is False:
        return None
    factor = content.get(FACTOR)
    if factor is None:
        what = f"has no {FACTOR}: the tool that wrote it does not record it"
        fix = f'add the one it was trained with, such as "{FACTOR}": 0.1 (its guide and example use 0.1, its code 0.01)'
        raise InputError(Fault(str(path), what, fix, code="SF-BOS"))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
        raise InputError(
            Fault(f"{path}: {FACTOR}", f"is {factor!r}, not a number of at least 0", "correct it", code="SF-BOS")
        )
    return float(factor)
