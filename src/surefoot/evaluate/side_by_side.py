"""Base and adapter from one set of weights in memory, run with the adapter switched off and on.

With its adapter off, a model computes bit for bit what the base computes: `tests/evaluate/test_side_by_side.py`
compares it with the separately loaded base. BOS scaling is then as in the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from surefoot.methods.open_model import OpenModel, saved_bos_scale
from surefoot.methods.provenance import saved_plan
from surefoot.methods.requests import Only, require_side
from surefoot.models.bos import install_bos_scaling
from surefoot.models.peft import PeftModel


@dataclass(frozen=True)
class Side:
    """One of the compared models.

    name: "base" and "adapter", or "model" without an adapter.
    entered: context manager factory for every use.
    """

    name: str
    entered: Callable[[], AbstractContextManager[object]]


def sides(opened: OpenModel, only: Only | None = None) -> tuple[Side, ...]:
    """The sides to compare, the base first. Raises InputError if `only` names a side that does not exist."""
    if not isinstance(opened.model, PeftModel):
        require_side(only, adapted=False)
        return (Side("model", nullcontext),)
    both = (Side("base", lambda: adapter_off(opened)), Side("adapter", nullcontext))
    return tuple(side for side in both if only in (None, side.name))


@contextmanager
def adapter_off(opened: OpenModel) -> Iterator[None]:
    """Context manager that switches the adapter of `opened` off."""
    model = opened.model
    assert isinstance(model, PeftModel)
    alone = saved_bos_scale(opened.base, opened.base, saved_plan(opened.base))
    install_bos_scaling(model, alone)
    try:
        with model.disable_adapter():
            yield
    finally:
        install_bos_scaling(model, opened.bos_scale)
