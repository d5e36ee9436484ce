"""Read the arguments of a trainer: those that its library knows, not what a script's subclass adds for itself."""

from __future__ import annotations

import dataclasses
from typing import Any

LIBRARIES = ("transformers", "trl", "peft")


def _fields(args: Any) -> list[Any]:
    """Return the fields of the nearest base class of a library."""
    known = next(one for one in type(args).__mro__ if one.__module__.partition(".")[0] in LIBRARIES)
    return list(dataclasses.fields(known))


def values_of(args: Any) -> dict[str, Any]:
    values = args.to_dict()
    known = {field.name for field in _fields(args)}
    return {name: value for name, value in values.items() if name in known and not callable(value)}


def defaults_of(args: Any) -> dict[str, Any]:
    """Return the default of each argument that has a plain one."""
    plain = (type(None), bool, int, float, str)
    found = {field.name: field.default for field in _fields(args)}
    return {name: value for name, value in found.items() if isinstance(value, plain)}


def evaluates(args: Any) -> bool:
    """Whether the trainer evaluates in the training; transformers before 4.41 has another name for it."""
    name = "eval_strategy" if hasattr(args, "eval_strategy") else "evaluation_strategy"
    return getattr(args, name) != "no"
