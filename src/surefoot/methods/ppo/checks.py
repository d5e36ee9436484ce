"""What is checked before the first update of a run that answers prompts, and how good PPO's reward model is.

The policy must be its reference, and the engine that draws answers the policy that learns. Both are seen in
log-probabilities of the first rollout. Where they differ, every ratio and every KL penalty of the run would be wrong
from the start, which shows much later as a reward that falls or a KL that explodes.

The reward model is measured on this run's held-out pairs where the evaluation data are preference records; else the
evaluation of the run that trained it is quoted; else the user is told that nobody knows.
"""

from __future__ import annotations

import shlex
from typing import Any

import torch

from surefoot.config.schema import DataConfig
from surefoot.data.batching.loader import all_pairs
from surefoot.data.batching.packing import Layout
from surefoot.data.tokenize.dataset import TokenisedDataset
from surefoot.families.files import read_json_if_there
from surefoot.methods.examples import prepare_examples
from surefoot.methods.method import LoadedModels, Notify, RunInputs
from surefoot.methods.reward import Ranking, evaluated_ranking
from surefoot.models.folder import resolve_folder
from surefoot.models.ppo_models import PPOModels
from surefoot.planning.plan import DType, RunPlan
from surefoot.report.results import ALL
from surefoot.system.errors import EnvironmentFault, Fault, InputError

# Mean difference per token, in nats. fp32: the same sums in another order, over some dozens of layers. The 16-bit types
# round every product (2^-8 and 2^-11), and decoding with a cache does so in another order than a whole sequence.
START_TOLERANCE: dict[DType, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


# Below these the drawn log-probabilities stand for those of the code that learns, in nats per token: the same products
# in fp32, summed in another order. A ratio is clipped two thousand times further from 1.
DRAWN_MEAN, DRAWN_MOST = 1e-5, 1e-4


def check_start(
    section: str,
    real: torch.Tensor,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    drawn: torch.Tensor,
    compute: DType,
) -> tuple[float, float | None]:
    """Of the first rollout: the KL of the policy from its reference per token, and the mean probability ratio between
    the code that learns and the engine that drew, None where that cannot tell.

    section: of the config, for faults.
    real: [E, R] bool, which places of the tables of log-probabilities are answers' tokens.

    Raises EnvironmentFault where either is further from 0 and 1 than the type of the products explains.
    """
    tolerance = START_TOLERANCE[compute]
    logprobs = logprobs[real].double()
    if not len(logprobs):
        return 0.0, None
    kl = logprobs - reference[real].double()
    faults = []
    if not kl.abs().mean() <= tolerance:
        what = (
            f"the policy is not its reference before the first update: log-probabilities differ by "
            f"{kl.abs().mean():.3g} per token, and {tolerance:g} is what {compute} explains"
        )
        faults.append(
            Fault(
                section, what, "the two were not loaded alike: report this with the run folder", code="SF-PLAN-BROKEN"
            )
        )
    drawn = drawn[real].double()
    known = ~drawn.isnan()
    ratio = None
    if known.any():
        moved = (logprobs - drawn)[known]
        ratio = float(moved.exp().mean())
        if not moved.abs().mean() <= tolerance or not abs(ratio - 1) <= tolerance:
            what = (
                f"answers are drawn from another distribution than is learned from: probability ratio {ratio:.4g}, "
                f"log-probabilities differ by {moved.abs().mean():.3g} per token, and {tolerance:g} is what {compute} "
                "explains"
            )
            faults.append(
                Fault(
                    section,
                    what,
                    f"check that {section}.engine serves this model; try precision: fp32 or attention: eager",
                    code="SF-PLAN-BROKEN",
                )
            )
    if faults:
        raise EnvironmentFault(faults)
    return float(kl.mean()), ratio


def drawn_suffice(real: torch.Tensor, logprobs: torch.Tensor, drawn: torch.Tensor, compute: DType) -> bool:
    """Whether the engine that drew the answers knows all log-probabilities as the code that learns computes them, up to
    rounding in fp32. In the 16-bit types one rollout that agrees promises nothing: what one rounding moves is far
    above the bounds."""
    if compute != "fp32":
        return False
    apart = (drawn - logprobs)[real].double().abs()
    return bool(len(apart)) and bool(apart.mean() <= DRAWN_MEAN) and bool(apart.max() <= DRAWN_MOST)


def dropout_caution(share: float) -> str | None:
    """`check_start` compares without dropout.

    share: the highest of the policy's layers while it learns.
    """
    if share == 0:
        return None
    return (
        f"caution: the policy learns with dropout {share:g}, and answers are drawn without: ratios scatter around 1 "
        "from the first step on, and some are clipped for that alone; leave adapter.dropout and model.dropout out"
    )


def say_prior(run: RunInputs, loaded: LoadedModels, notify: Notify) -> None:
    """One sentence, a caution where the reward model is hardly better than chance or may be; nothing where scores come
    from elsewhere."""
    models = loaded.model
    assert isinstance(models, PPOModels)
    if not models.has_reward:
        return
    named = run.config.ppo.reward
    assert named is not None, "the models have the reward model that the config names"
    pairs = _held_out_pairs(run)
    if pairs is None:
        folder, whose = resolve_folder(named, None, weights=True), f" of the run that made {named}"
        ranking = evaluated_ranking(read_json_if_there(folder / ALL))
    else:
        ranking, whose = measure_prior(models, pairs, run.plan, loaded), ""
    if ranking is None:
        measure = f"surefoot evaluate reward {shlex.quote(named)} PAIRS"
        notify(
            f"caution: how often the reward model prefers the better answer is not known here: {measure} measures it"
        )
        return
    doubtful = ranking.caution
    notify(f"{'caution: ' if doubtful else ''}on held-out pairs{whose}, {doubtful or ranking}", caution=bool(doubtful))


def measure_prior(models: PPOModels, pairs: TokenisedDataset, plan: RunPlan, loaded: LoadedModels) -> Ranking:
    """How often the reward model prefers the better answer of these pairs.

    pairs: 2 rows each, the better answer first.
    """
    right, count = 0.0, 0
    with torch.no_grad(), models.inference():
        for batch in all_pairs(pairs, Layout(plan.tokenizer.pad_id, most=max(1, plan.batch.micro.value // 2))):
            with loaded.settings.kernels(), loaded.settings.forward():
                better, worse = models.scores(batch.to(loaded.engine.device).rows).chunk(2)
            right += float((better > worse).sum()) + 0.5 * float((better == worse).sum())
            count += batch.weight
    return Ranking(right / count, count)


def _held_out_pairs(run: RunInputs) -> TokenisedDataset | None:
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
