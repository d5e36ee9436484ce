"""Cautions and refusals of a plan: what is known to go wrong with this model, and dropout in its own layers.

Every policy writes into one `Notes`, so that all conflicts of a run are reported at once. Rewards, DPO, KTO and PPO
compare numbers of two answers, of two models or of two moments. Masks drawn apart for each make differences out of
nothing, so these stages train without dropout unless told otherwise; TRL does the same (`disable_dropout`), and
DeepSpeed-Chat's guide advises it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts, with_dropout
from surefoot.planning.plan import OWN_DROPOUT, Choice, Dropout, DType
from surefoot.system.errors import Fault


@dataclass
class Notes:
    """faults refuse the run; cautions are printed and the run goes on."""

    faults: list[Fault] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    def refuse(self, key: str, what: str, fix: str = "", code: str = "SF-CONFIG-CONFLICT") -> None:
        """Add a fault, which refuses the run.

        key: the dotted config key that asks for the impossible.
        code: see `Fault`.
        """
        self.faults.append(Fault(key, what, fix, code))

    def caution(self, sentence: str) -> None:
        self.cautions.append(sentence)


def plan_hazards(model: ModelFacts, compute: DType, longest: int, notes: Notes) -> None:
    """Caution of what is known to go wrong with this model.

    compute: dtype of the matrix products.
    longest: tokens of the longest example.
    """
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


def plan_dropout(config: RunConfig) -> Choice[Dropout]:
    """A share, or that the model keeps its own."""
    requested = config.model.dropout
    if requested == OWN_DROPOUT:
        return Choice(OWN_DROPOUT, "asked for: as its config.json says", "user")
    if requested is not None:
        return Choice(requested, "asked for", "user")
    if why := config.method.compared:
        return Choice(0.0, f"{why}, and masks would be noise in it; model.dropout: own has config.json's", "default")
    return Choice(OWN_DROPOUT, "as its config.json says", "family")


def as_trained(model: ModelFacts, config: RunConfig) -> ModelFacts:
    """The facts of the model under the dropout that it trains with."""
    planned = plan_dropout(config).value
    return with_dropout(model, None if planned == OWN_DROPOUT else planned)
