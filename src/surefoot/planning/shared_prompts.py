"""Whether what both answers of a pair begin with goes through the model once (`surefoot.models.shared_prefix`).

It does where the result is that of whole rows up to rounding and where it was measured to be faster; everywhere else
rows stay whole, with the first reason why. There is no key for it: it changes no number but by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.plan import Choice, Source


def plan_shared_prompts(
    config: RunConfig, model: ModelFacts, *, device: str, checkpointing: bool, engine: str
) -> Choice[bool]:
    """model: with the dropout that it trains with. device: cpu | cuda | mps. checkpointing: activations are computed
    again. engine: as planned."""
    reasons = _obstacles(config, model, device, checkpointing, engine)
    if (found := next(reasons, None)) is not None:
        return Choice(False, *found)
    saves = "in padded rows, where it saves a fifth of the tokens; measured on CPUs: 1.1 to 1.7 times as fast"
    return Choice(True, saves, "hardware")


def may_share(config: RunConfig, model: ModelFacts, device: str) -> bool:
    """Whether prompts would be computed once, as far as it is known before memory and engine are planned: both are
    taken to be as is usual where they are left open."""
    if config.stage != "reward":
        return False
    again = config.gradient_checkpointing not in ("auto", "off")
    engine = "single" if config.parallel.engine == "auto" else config.parallel.engine
    return next(_obstacles(config, model, device, again, engine), None) is None


def _obstacles(
    config: RunConfig, model: ModelFacts, device: str, checkpointing: bool, engine: str
) -> Iterator[tuple[str, Source]]:
    if device != "cpu":
        yield f"whether it is faster was not measured on {device}", "hardware"
    if model.family is None:
        yield "of this family it is not known that a cache of keys and values changes nothing", "family"
    if model.window is not None:
        yield f"layers with a window of {model.window} tokens drop keys of the prompt", "family"
    if model.rotary_switch is not None:
        yield "positions are turned by another table in longer inputs", "family"
    if _drops(config, model):
        yield "dropout would be drawn once for both answers", "user"
    if config.bos.scale != 1:
        yield "a scaled BOS is looked at in whole rows", "user"
    if checkpointing:
        yield "gradient checkpointing keeps no keys and values", "hardware"
    if config.compile != "off":
        yield "the compiled decoder is that of whole rows", "user"
    if engine not in ("single", "ddp"):
        yield f"{engine} gathers weights for one forward pass at a time", "user"


def _drops(config: RunConfig, model: ModelFacts) -> bool:
    own = bool(model.dropouts) or model.attention_dropout > 0
    return own or (config.adapter is not None and config.adapter.dropout > 0)
