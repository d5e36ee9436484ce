"""Fast paths of a model: what is put in for its own modules and computes the same, one file for each.

undo = path.install(model)
...
undo()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

Undo = Callable[[], None]


@dataclass(frozen=True)
class FastPath:
    """A faster way to compute the same, which can be put into a model and taken out.

    name: the key under `kernels:` that switches it, or "documents".
    install: patches a model in place, leaving names and values of its parameters as they are, and returns what takes
        the patch out again.
    obstacle: why it cannot be put into this model, which only the model itself shows; empty where it can.
    form: which of several ways to compute it this is, for the record; empty where there is one.
    """

    name: str
    install: Callable[[nn.Module], Undo]
    obstacle: Callable[[nn.Module], str] = lambda model: ""
    form: str = ""
