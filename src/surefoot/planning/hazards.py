"""What is known to go wrong with this model, as sentences for the plan."""

from __future__ import annotations

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import DType


def plan_hazards(model: ModelFacts, compute: DType, longest: int, notes: Notes) -> None:
    """compute: dtype of the matrix products. longest: tokens of the longest example."""
    if model.family is None:
        notes.caution(
            f"model_type {model.model_type!r} is not described yet: names and sizes come from the module tree that "
            "transformers builds, PAD and BOS from the tokenizer; what is known to go wrong with it is not known here"
        )
    _dropout(model, notes)
    for hazard in model.family.hazards if model.family else ():
        if hazard.compute in (None, compute):
            notes.caution(hazard.sentence)
    if model.rotary_switch is not None and longest > model.rotary_switch:
        notes.caution(
            f"rows of more than {model.rotary_switch} tokens use another rotary table, and so do all rows beside them: "
            f"here micro-batches change the result; data.max_length: {model.rotary_switch} avoids it"
        )


def _dropout(model: ModelFacts, notes: Notes) -> None:
    """Families whose config.json sets it, or leaves it to a default above 0, train with it; people seldom expect it."""
    shares = dict(model.dropouts)
    if model.attention_dropout:
        shares["attention dropout"] = model.attention_dropout
    if shares:
        named = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        notes.caution(f"this model drops out in training ({named}); model.dropout: 0 trains without")
