"""Cautions and refusals of a plan: known problems of a model, and dropout in its layers.

Every planning function writes into one `Notes`, so that all conflicts of a run are reported at once. Reward models,
DPO, KTO and PPO compare values of two answers, two models or two points in time. Different dropout masks would add
noise to the comparison, so these stages train without dropout by default, like TRL (`disable_dropout`) and as
DeepSpeed-Chat's guide advises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts, with_dropout
from surefoot.planning.plan import OWN_DROPOUT, Choice, Dropout, DType
from surefoot.system.errors import Fault


@dataclass
class Notes:
    """Collects faults, which refuse the run, and cautions, which are only printed."""

    faults: list[Fault] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    def refuse(self, key: str, what: str, fix: str = "", code: str = "SF-CONFIG-CONFLICT") -> None:
        """Add a fault, which refuses the run.

        key: dotted config key of the impossible request.
        code: see `Fault`.
        """
        self.faults.append(Fault(key, what, fix, code))

    def caution(self, sentence: str) -> None:
        self.cautions.append(sentence)


def plan_hazards(model: ModelFacts, compute: DType, longest: int, notes: Notes) -> None:
    """Add cautions about known problems of this model.

    compute: dtype of the matrix products.
    longest: tokens of the longest example.
    """
    if model.family is None:
        notes.caution(
            f"model_type {model.model_type!r} is not described yet: names and sizes come from the module tree that "
            "transformers builds, PAD and BOS from the tokenizer; its pitfalls are unknown"
        )
    _dropout(model, notes)
    for hazard in model.family.hazards if model.family else ():
        if hazard.compute in (None, compute):
            notes.caution(hazard.sentence)
    if model.rotary_switch is not None and longest > model.rotary_switch:
        notes.caution(
            f"rows of more than {model.rotary_switch} tokens use another rotary table, and so do all rows of a batch: "
            f"here micro-batches change the result; data.max_length: {model.rotary_switch} avoids it"
        )


def _dropout(model: ModelFacts, notes: Notes) -> None:
    """Caution about families whose config.json or defaults enable dropout in training, which few users expect."""
    shares = dict(model.dropouts)
    if model.attention_dropout:
        shares["attention dropout"] = model.attention_dropout
    if shares:
        named = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        notes.caution(f"this model uses dropout in training ({named}); model.dropout: 0 trains without")


def plan_dropout(config: RunConfig) -> Choice[Dropout]:
    """Choose the dropout probability of the model's own layers, or keep the model's own."""
    requested = config.model.dropout
    if requested == OWN_DROPOUT:
        return Choice(OWN_DROPOUT, "asked for: as its config.json says", "user")
    if requested is not None:
        return Choice(requested, "asked for", "user")
    if why := config.method.compared:
        return Choice(0.0, f"{why}, and dropout would add noise; model.dropout: own uses config.json's", "default")
    return Choice(OWN_DROPOUT, "as its config.json says", "family")


def as_trained(model: ModelFacts, config: RunConfig) -> ModelFacts:
    """Return the model's facts with the dropout it is trained with."""
    planned = plan_dropout(config).value
    return with_dropout(model, None if planned == OWN_DROPOUT else planned)
