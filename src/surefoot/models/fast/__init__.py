"""Fast paths: replacements for parts of a model that compute the same faster, one file each.

undo = path.install(model)
...
undo()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

Undo = Callable[[], None]


@dataclass(frozen=True)
class FastPath:
    """A faster implementation that can be installed in a model and removed again.

    name: its key under `kernels:`, or "documents".
    install: patches a model in place, without changing names or values of its parameters; returns the function that
        removes the patch.
    obstacle: why it cannot be installed in this model, as far as the model itself shows; "" if it can.
    form: name of the implementation, if there are several; else "".
    """

    name: str
    install: Callable[[nn.Module], Undo]
    obstacle: Callable[[nn.Module], str] = lambda model: ""
    form: str = ""


class FastForward(Protocol):
    """A module and the forward that it is given."""

    @property
    def module(self) -> nn.Module: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


def give_forwards(patched: Sequence[FastForward]) -> Undo:
    """Give each module its fast forward; return the undo function."""
    for one in patched:
        one.module.forward = one.forward

    def undo() -> None:
        for one in patched:
            del one.module.forward

    return undo
