"""Everything that is known by a model's name stands here, one row per family. A new family is a new row."""

from __future__ import annotations

from surefoot.families.family import Family
from surefoot.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)


def find(model_type: str) -> Family | None:
    """The family of config.json's `model_type`; None for one that nobody has described yet."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
