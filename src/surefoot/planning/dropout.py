"""Dropout of the model's own layers while it trains: asked for, off where a method compares scores, or config.json's.

Rewards, DPO, KTO and PPO compare numbers of two answers, of two models or of two moments. Masks drawn apart for each
make differences out of nothing, so these stages train without unless told otherwise; TRL does the same
(`disable_dropout`), and DeepSpeed-Chat's guide advises it.
"""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts, with_dropout
from surefoot.planning.plan import OWN_DROPOUT, Choice, Dropout

_STILL = {
    "reward": "scores of two answers are compared",
    "dpo": "log-probabilities of two answers and of two models are compared",
    "kto": "log-probabilities of two models are compared",
    "ppo": "log-probabilities before and after an update are compared",
}


def plan_dropout(config: RunConfig) -> Choice[Dropout]:
    """A share, or that the model keeps its own."""
    asked = config.model.dropout
    if asked == OWN_DROPOUT:
        return Choice(OWN_DROPOUT, "asked for: as its config.json says", "user")
    if asked is not None:
        return Choice(asked, "asked for", "user")
    if (why := _STILL.get(config.stage)) is not None:
        return Choice(0.0, f"{why}, and masks would be noise in it; model.dropout: own has config.json's", "default")
    return Choice(OWN_DROPOUT, "as its config.json says", "family")


def as_trained(model: ModelFacts, config: RunConfig) -> ModelFacts:
    """The facts of the model under the dropout that it trains with."""
    planned = plan_dropout(config).value
    return with_dropout(model, None if planned == OWN_DROPOUT else planned)
