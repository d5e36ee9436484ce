"""Choose the coefficient of a mixture's load-balancing loss.

Mixtures are pretrained with this loss. Fine-tuning code mostly omits it: transformers adds it only if config.json says
`output_router_logits: true`, regardless of `router_aux_loss_coef`, and published configs say false. `auto` follows
config.json, so that a run equals that of transformers' Trainer.
"""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice

_KEY = "model.router_aux_loss_coef"


def plan_balance(config: RunConfig, model: ModelFacts, notes: Notes) -> Choice[float] | None:
    """Return the coefficient; None for a model without experts."""
    requested = config.model.router_aux_loss_coef
    if requested != "auto" and requested and (why := _obstacle(config, model)):
        notes.refuse(_KEY, why, "leave it out, or set it to 0")
    if not model.experts:
        return None
    if requested == "own":
        return Choice(model.balance or 0.0, "asked for: the coefficient of config.json", "user")
    if requested != "auto":
        return Choice(requested, "asked for", "user")
    if model.balance is None:
        return Choice(0.0, "the family defines no load-balancing loss", "family")
    if not model.balances:
        return Choice(
            0.0, f"config.json says output_router_logits: false; its coefficient is {model.balance:g}", "family"
        )
    if why := _obstacle(config, model):
        notes.caution(f"config.json trains with a load-balancing loss, but this run does not: {why}")
        return Choice(0.0, why, "default")
    return Choice(model.balance, "config.json trains with it (output_router_logits: true)", "family")


def _obstacle(config: RunConfig, model: ModelFacts) -> str:
    """Return why the loss cannot be computed; empty if it can."""
    if not model.experts:
        return f"{model.model_type} has no experts"
    if model.balance is None:
        return f"{model.model_type} defines no load-balancing loss"
    if config.method.rollouts or config.method.scores:
        return f"stage {config.stage} sends some tokens through the model more than once a step"
    return "torch.compile cannot trace what looks at the routers" if config.compile != "off" else ""
