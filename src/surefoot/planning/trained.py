"""Which modules of the language model train in full fine-tuning: all, those that `model.trained` names, or all but an
output head that the method never calls. The others keep their weights and have neither gradient nor optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import TokenizerPlan

_KEY = "model.trained"
_LAST = re.compile(r"\(last (of )?(\d+)( parts)?\)")


def with_layers(config: RunConfig, model: ModelFacts, notes: Notes) -> RunConfig:
    """Return the config with numbers of layers in place of `(last N)`, the last N, and of `(last of N parts)`, the last
    of each of N equal parts, in its patterns of modules that train."""

    def numbers(found: re.Match[str]) -> str:
        wanted, layers = int(found[2]), range(model.layers)
        if bool(found[1]) != bool(found[3]) or not wanted or (found[1] and model.layers % wanted):
            notes.refuse(_KEY, f"{found[0]} selects no layers of {model.layers}", "such as (last 2), (last of 4 parts)")
            return found[0]
        step = model.layers // wanted if found[1] else 1
        return f"({'|'.join(map(str, layers[step - 1 :: step] if found[1] else layers[-wanted:]))})"

    if config.model.trained is None:
        return config
    trained = [_LAST.sub(numbers, pattern) for pattern in config.model.trained]
    return config.model_copy(update={"model": config.model.model_copy(update={"trained": trained})})


def trains(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the module's whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def only_trained(config: RunConfig, model: ModelFacts) -> ModelFacts:
    """Return the model's facts with the modules that train in full. A tied head trains where its embedding does."""

    def stays(name: str) -> bool:
        if (patterns := config.model.trained) is not None:
            return not trains(model.embedding if model.tied and name == model.head else name, patterns)
        return config.method.scores and not model.tied and name == model.head

    return replace(model, modules=tuple(module for module in model.modules if not stays(module.name)))


def idle_parameters(config: RunConfig, model: ModelFacts, tokens: TokenizerPlan) -> int:
    """Return the number of parameters that stay frozen in full fine-tuning, with rows added to embedding and head."""
    if config.adapter is not None:
        return 0
    kept = {module.name for module in only_trained(config, model).modules}
    idle = [one for one in model.modules if one.name not in kept and not (model.tied and one.name == model.head)]
    ends = sum(one.name in (model.embedding, model.head) for one in idle)
    return sum(one.parameters for one in idle) + ends * tokens.added_rows * model.embedding_width


def check_trained(config: RunConfig, model: ModelFacts, notes: Notes) -> None:
    """Refuse patterns of `model.trained` that match no module of the model; warn if rows of new tokens stay frozen."""
    names = [one.name for one in model.modules if not (model.tied and one.name == model.head)]
    for pattern in config.model.trained or ():
        if not any(trains(name, [pattern]) for name in names):
            tied = ", and its head is the embedding" if model.tied else ""
            what = f"{pattern!r} matches no module with weights: the model has {names[0]}, {names[-1]} and others{tied}"
            notes.refuse(
                _KEY, what, "mend the pattern, which must match a module's whole name; .* at its end takes those inside"
            )
    kept = {one.name for one in only_trained(config, model).modules}
    if (config.tokenizer.add or config.tokenizer.add_special) and config.model.trained and model.embedding not in kept:
        notes.caution(f"the rows of added tokens stay as they are: {_KEY} leaves {model.embedding} frozen")
