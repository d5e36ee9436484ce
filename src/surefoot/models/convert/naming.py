"""Names of weights: shown, changed one by one, and picked out of the decoder layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from surefoot.models.convert.tensors import LazyTensor, Tensors
from surefoot.system.errors import Fault, InputError

SHOWN = 3  # names per message: enough to see the pattern


def some(names: Iterable[str]) -> str:
    """The first names, and that there are more."""
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, LazyTensor]:
    """Every name through `rename`. Raises InputError where two become one."""
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in result:
            raise InputError(Fault(name, f"two weights would be called {new}"))
        result[new] = tensor
    return result


def require_free(name: str, tensors: Tensors) -> None:
    if name in tensors:
        raise InputError(Fault(name, "is there already: the file holds a weight both fused and split"))


def in_layers(layers: str, paths: Iterable[str]) -> re.Pattern[str]:
    """Weights and biases of these modules in every decoder layer."""
    either = "|".join(map(re.escape, paths))
    return re.compile(rf"(?P<front>{re.escape(layers)}\.\d+)\.(?P<path>{either})\.(?P<kind>weight|bias)")
