"""How good the reward model is, before PPO goes by it: its accuracy on held-out pairs, where the evaluation data are
preference records.

PPO makes the most of whatever the reward model says. One that tells better from worse answers little more often than a
coin does teaches noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surefoot.data.layout import Layout
from surefoot.data.loader import all_pairs
from surefoot.errors import InputError
from surefoot.models.cast import Cast
from surefoot.planning.plan import RunPlan
from surefoot.stages.examples import prepare_examples
from surefoot.stages.stage import Say

if TYPE_CHECKING:
    from surefoot.data.dataset import TokenisedDataset
    from surefoot.stages.prepared import Prepared
    from surefoot.stages.setup import Setup

ENOUGH = 0.6  # as guides to the three steps have it; a coin has 0.5


@dataclass(frozen=True)
class Prior:
    """accuracy: share of pairs whose better answer has the higher score; equal scores count half."""

    accuracy: float
    pairs: int


def say_prior(run: Prepared, setup: Setup, say: Say) -> None:
    """One sentence, and a caution where the reward model is hardly better than chance; nothing where scores come from
    elsewhere, or no pairs are held out."""
    cast = setup.model
    assert isinstance(cast, Cast)
    if not cast.has_reward or (pairs := _held_out_pairs(run)) is None:
        return
    prior = measure_prior(cast, pairs, run.plan, setup)
    told = f"the reward model prefers the better answer in {prior.accuracy:.1%} of {prior.pairs:,} held-out pairs"
    say(told, caution=False)
    if prior.accuracy <= ENOUGH:
        say(
            f"caution: {ENOUGH:.0%} is the least at which PPO is worth while: train the reward model on more pairs, or "
            "for longer, first"
        )


def measure_prior(cast: Cast, pairs: TokenisedDataset, plan: RunPlan, setup: Setup) -> Prior:
    """pairs: 2 rows each, the better answer first."""
    right, count = 0.0, 0
    with torch.no_grad(), cast.still():
        for batch in all_pairs(pairs, Layout(plan.tokenizer.pad_id, most=max(1, plan.batch.micro.value // 2))):
            with setup.settings.kernels(), setup.settings.forward():
                better, worse = cast.scores(batch.to(setup.engine.device).rows).chunk(2)
            right += float((better > worse).sum()) + 0.5 * float((better == worse).sum())
            count += batch.weight
    return Prior(right / count, count)


def _held_out_pairs(run: Prepared) -> TokenisedDataset | None:
    """Of the evaluation data; None where there is none, or its records are no pairs."""
    config = run.config
    held_out = config.data.eval
    if held_out == "none":
        return None
    data = config.data
    if isinstance(held_out, tuple):
        data = data.model_copy(update={"train": held_out, "eval": "none"})
    as_pairs = config.model_copy(update={"stage": "reward", "data": data})
    try:
        prepared = prepare_examples(as_pairs, run.plan.tokenizer, run.tokenizer)
    except InputError:
        return None
    return prepared.train if isinstance(held_out, tuple) else prepared.eval
