"""What cannot be held in 4 bits, found before anything is loaded."""

from __future__ import annotations

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan

_BASE = "hold the base in 16 bits (precision.base: bf16)"


def check_packed_base(model: ModelFacts, adapter: AdapterPlan | None, notes: Notes) -> None:
    """Refuse precision.base: nf4 for layers that have no 4-bit form, and for modules that shall train in full."""
    if model.family and any(linear.transposed for linear in model.family.linears):
        what = f"nf4: the linear layers of {model.model_type} hold their weights transposed, which has no 4-bit form"
        notes.refuse("precision.base", what, _BASE)
    for name in adapter.modules_to_save if adapter else ():
        if any(module.in_layer and module.linear and module.name.endswith(name) for module in model.modules):
            what = f"{name} would train in full, and precision.base: nf4 holds it in 4 bits, which cannot train"
            notes.refuse("adapter.modules_to_save", what, f"leave it out, or {_BASE}")
