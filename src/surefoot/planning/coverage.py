"""Count the weights of each kind of layer, how many of them an adapter covers, and how many parameters it trains there.

An adapter covers a matrix that it adds to, and a module that it trains in full. In a mixture most weights are in the
experts: an adapter on attention alone trains a much smaller model than the one chosen, and its loss does not show that.
So an adapter that covers less than half of the decoder layers' weights without being asked to is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from surefoot.families.model_facts import ModelFacts, ModuleFact
from surefoot.families.vision_parts import part_of
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, KindCoverage

_MIN_COVERAGE = 0.5  # fraction of the decoder layers' weights
_ATTENTION = ("attn", "attention")
_STATE = ("mamba", "mixer", "ssm")
_NORM = ("norm", "ln_")
_PLACE = ("embed", "wpe")
VISION = {"tower": "vision tower", "projector": "projector"}
BESIDE = "vision, sound"  # everything else outside the language model
# In display order. The first five make up the decoder layers.
DECODER = ("attention", "MLP", "experts", "router", "state space")
KINDS = (*DECODER, "norms", "embeddings", "head", "other", *VISION.values(), BESIDE)


def kind_of(module: ModuleFact, model: ModelFacts) -> str:
    """Return the module's kind, one of `KINDS`. A shared expert counts as an MLP."""
    parts = module.name.split(".")
    if module.name == model.embedding:
        return "embeddings"
    if module.name == model.head:
        return "head"
    if any(word in parts[-1] for word in _NORM):
        return "norms"
    if not module.in_layer:
        return "embeddings" if any(word in parts[-1] for word in _PLACE) else "other"
    if module.routes:
        return "router"
    if module.of_experts:
        return "experts"
    for kind, words in (("attention", _ATTENTION), ("state space", _STATE)):
        if any(word in part for part in parts for word in words):
            return kind
    return "MLP" if module.linear else "other"


def coverage(
    model: ModelFacts, adapter: AdapterPlan | None, trained: Collection[str] = (), full: ModelFacts | None = None
) -> tuple[KindCoverage, ...]:
    """Return the coverage of each kind that the model has, in the order of `KINDS`.

    adapter: None for full fine-tuning.
    trained: parts of the vision model that are trained too.
    full: the modules that full fine-tuning trains; None for all.
    """
    found = {kind: [0, 0, 0] for kind in KINDS}
    whole = {module.name for module in (full or model).modules}
    for module in model.modules:
        row = found[kind_of(module, model)]
        tied = model.tied and module.name == model.head
        learns = (0, 0) if adapter is None and module.name not in whole else _learns(module, model, adapter, tied)
        for place, number in enumerate((0 if tied else module.parameters, *learns)):
            row[place] += number
    rest = model.wrapper_parameters
    for part, kind in VISION.items():
        own = sum(math.prod(shape) for name, shape in model.vision if part_of(name) == part)
        linears = [module for module in model.vision_linears if part_of(f"{module.name}.weight") == part]
        adapted = [_learns(module, model, adapter, False) for module in linears if adapter]
        learns = (own, own) if part in trained else (sum(one[0] for one in adapted), sum(one[1] for one in adapted))
        found[kind], rest = [own, *learns], rest - own
    found[BESIDE][0] = rest
    return tuple(KindCoverage(kind, *row) for kind, row in found.items() if any(row))


def _learns(module: ModuleFact, model: ModelFacts, adapter: AdapterPlan | None, tied: bool) -> tuple[int, int]:
    """Number of the module's weights that are covered, and of parameters trained for them."""
    own = 0 if tied else module.parameters
    if adapter is None or any(module.name.endswith(name) for name in adapter.modules_to_save):
        return own, own
    if module.linear and module.name in adapter.targets.value:
        inputs, outputs = module.linear
        dora = outputs if adapter.kind.value == "dora" else 0
        return min(own, inputs * outputs), adapter.rank * (inputs + outputs) + dora
    reached = [one for one in module.matrices if f"{module.name}.{one.name}" in adapter.parameters]
    return sum(one.numbers for one in reached), adapter.rank * sum(one.sides for one in reached)


def check_depth(rows: tuple[KindCoverage, ...], why: str, fixes: tuple[str, str], notes: Notes, key: str) -> None:
    """Refuse an adapter that covers less than half of the decoder layers' weights.

    why: why it does not cover more.
    fixes: how to cover more, and how to allow low coverage.
    key: the adapter's key in the config.
    """
    decoder = [row for row in rows if row.kind in DECODER]
    weights, reached = sum(row.weights for row in decoder), sum(row.reached for row in decoder)
    if reached >= _MIN_COVERAGE * weights:
        return
    what = (
        f"the adapter would cover {reached:,} of the decoder layers' {weights:,} weights ({reached / weights:.0%}): "
        f"{why}"
    )
    notes.refuse(f"{key}.targets", what, " or, to train like this on purpose, ".join(fixes), "SF-ADAPTER-SHALLOW")
