"""How good the reward model is, said before PPO goes by it: measured on this run's held-out pairs, where the evaluation
data are preference records; else as the run that trained it was evaluated; else that nobody knows."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import torch

from surefoot.config.schema import DataConfig
from surefoot.data.layout import Layout
from surefoot.data.loader import all_pairs
from surefoot.families.files import read_json_if_there
from surefoot.methods.examples import prepare_examples
from surefoot.methods.method import Say
from surefoot.methods.ranking import Ranking, evaluated_ranking
from surefoot.models.folder import resolve_folder
from surefoot.models.ppo_models import PPOModels
from surefoot.planning.plan import RunPlan
from surefoot.report.results import ALL
from surefoot.system.errors import InputError

if TYPE_CHECKING:
    from surefoot.data.dataset import TokenisedDataset
    from surefoot.runs.prepared import Prepared
    from surefoot.runs.setup import Setup


def say_prior(run: Prepared, setup: Setup, say: Say) -> None:
    """One sentence, a caution where the reward model is hardly better than chance or may be; nothing where scores come
    from elsewhere."""
    cast = setup.model
    assert isinstance(cast, PPOModels)
    if not cast.has_reward:
        return
    named = run.config.ppo.reward
    assert named is not None, "a cast has the reward model that the config names"
    pairs = _held_out_pairs(run)
    if pairs is None:
        folder, whose = resolve_folder(named, None, weights=True), f" of the run that made {named}"
        ranking = evaluated_ranking(read_json_if_there(folder / ALL))
    else:
        ranking, whose = measure_prior(cast, pairs, run.plan, setup), ""
    if ranking is None:
        measure = f"surefoot evaluate reward {shlex.quote(named)} PAIRS"
        say(f"caution: how often the reward model prefers the better answer is not known here: {measure} measures it")
        return
    doubtful = ranking.caution
    say(f"{'caution: ' if doubtful else ''}on held-out pairs{whose}, {doubtful or ranking}", caution=bool(doubtful))


def measure_prior(cast: PPOModels, pairs: TokenisedDataset, plan: RunPlan, setup: Setup) -> Ranking:
    """pairs: 2 rows each, the better answer first."""
    right, count = 0.0, 0
    with torch.no_grad(), cast.inference():
        for batch in all_pairs(pairs, Layout(plan.tokenizer.pad_id, most=max(1, plan.batch.micro.value // 2))):
            with setup.settings.kernels(), setup.settings.forward():
                better, worse = cast.scores(batch.to(setup.engine.device).rows).chunk(2)
            right += float((better > worse).sum()) + 0.5 * float((better == worse).sum())
            count += batch.weight
    return Ranking(right / count, count)


def _held_out_pairs(run: Prepared) -> TokenisedDataset | None:
    """Of the evaluation data; None where there is none, or its records are no pairs."""
    config = run.config
    held_out = config.data.eval
    if held_out == "none":
        return None
    data = _read_as_they_are(config.data)
    if isinstance(held_out, tuple):
        data = data.model_copy(update={"train": data.eval, "eval": "none"})
    as_pairs = config.model_copy(update={"stage": "reward", "data": data})
    try:
        prepared = prepare_examples(as_pairs, run.plan.tokenizer, run.tokenizer)
    except InputError:
        return None
    return prepared.train if isinstance(held_out, tuple) else prepared.eval


def _read_as_they_are(data: DataConfig) -> DataConfig:
    """Without the word that only the prompts are wanted: what stands beside them is looked for here."""

    def read(group: Any) -> Any:
        if not isinstance(group, tuple):
            return group
        return tuple(one.model_copy(update={"format": "auto"}) if one.format == "prompts" else one for one in group)

    layout = "auto" if data.format == "prompts" else data.format
    return data.model_copy(update={"train": read(data.train), "eval": read(data.eval), "format": layout})
