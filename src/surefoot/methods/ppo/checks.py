"""Checks before the first update of a run with rollouts, and the accuracy of PPO's reward model.

The policy must equal its reference, and the generating engine must agree with the training code. Both are checked with
the log-probabilities of the first rollout. Otherwise every ratio and KL penalty of the run would be wrong from the
start, which would only show much later as a falling reward or an exploding KL.

The reward model is measured on this run's held-out pairs if the evaluation data has preference records; else the
evaluation of the run that trained it is quoted; else the user is told that its accuracy is unknown.
"""

from __future__ import annotations

import shlex
from typing import Any

import torch

from surefoot.config.sections import DataConfig
from surefoot.data.batching.loader import Layout, all_pairs
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.families.files import read_json_if_there
from surefoot.methods.examples import prepare_examples
from surefoot.methods.method import LoadedModels, Notify, RunInputs
from surefoot.methods.reward import Ranking, evaluated_ranking
from surefoot.models.folder import resolve_folder
from surefoot.models.ppo_models import PPOModels
from surefoot.planning.plan import DType, RunPlan
from surefoot.report.results import ALL
from surefoot.system.errors import EnvironmentFault, Fault, InputError

# Mean difference per token, in nats. fp32: the same sums in another order, over dozens of layers. 16-bit dtypes round
# every product (2^-8 and 2^-11), and decoding with a cache does so in another order than a whole sequence.
START_TOLERANCE: dict[DType, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


# Below these (nats per token) the engine's log-probabilities replace those of the training code: the same fp32
# products, summed in another order. Ratios are clipped two thousand times further from 1.
DRAWN_MEAN, DRAWN_MOST = 1e-5, 1e-4


def check_start(
    section: str,
    real: torch.Tensor,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    drawn: torch.Tensor,
    compute: DType,
) -> tuple[float, float | None]:
    """Return, for the first rollout, the KL of the policy from its reference per token, and the mean probability ratio
    between training code and engine (None if the engine gives no log-probabilities).

    section: config section, for faults.
    real: [E, R] bool, True at answer tokens of the tables of log-probabilities.

    Raises EnvironmentFault if one differs from 0 or 1 by more than the compute dtype explains.
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
            faults.append(_other_distribution(section, moved, compute))
    if faults:
        raise EnvironmentFault(faults)
    return float(kl.mean()), ratio


def check_server(section: str, real: torch.Tensor, logprobs: torch.Tensor, drawn: torch.Tensor, compute: DType) -> None:
    """Raise EnvironmentFault if a server's log-probabilities of a later rollout are not the policy's: it may say that
    it has the new weights and compute with old ones. The arguments are those of `check_start`."""
    moved = (logprobs - drawn)[real].double()
    moved = moved[~moved.isnan()]
    if len(moved) and not moved.abs().mean() <= START_TOLERANCE[compute]:
        raise EnvironmentFault(_other_distribution(section, moved, compute))


def _other_distribution(section: str, moved: torch.Tensor, compute: DType) -> Fault:
    """moved: log-probabilities of the policy less those of the engine, of each token."""
    what = (
        f"answers are drawn from another distribution than is learned from: probability ratio "
        f"{moved.exp().mean():.4g}, log-probabilities differ by {moved.abs().mean():.3g} per token, and "
        f"{START_TOLERANCE[compute]:g} is what {compute} explains"
    )
    fix = f"check that {section}.engine serves this model; try precision: fp32 or attention: eager"
    return Fault(section, what, fix, code="SF-PLAN-BROKEN")


def ratio_text(ratio: float | None) -> str:
    """Return the ratio of `check_start` as the user is told it."""
    if ratio is None:
        return "the engine tells no log-probabilities"
    return f"ratio {ratio:.6f} to the engine's probabilities"


def drawn_suffice(real: torch.Tensor, logprobs: torch.Tensor, drawn: torch.Tensor, compute: DType) -> bool:
    """Whether the engine's log-probabilities equal those of the training code up to fp32 rounding. In 16-bit dtypes one
    agreeing rollout proves nothing: a single rounding is far above the bounds."""
    if compute != "fp32":
        return False
    apart = (drawn - logprobs)[real].double().abs()
    return bool(len(apart)) and bool(apart.mean() <= DRAWN_MEAN) and bool(apart.max() <= DRAWN_MOST)


def dropout_caution(share: float) -> str | None:
    """Caution about dropout in the policy, since `check_start` compares without it.

    share: highest dropout probability of the policy's layers in training.
    """
    if share == 0:
        return None
    return (
        f"caution: the policy learns with dropout {share:g}, and answers are drawn without: ratios scatter around 1 "
        "from the first step on, and some are clipped for that alone; leave adapter.dropout and model.dropout out"
    )


def notify_reward_accuracy(run: RunInputs, loaded: LoadedModels, notify: Notify) -> None:
    """Report the reward model's accuracy in one sentence, a caution if it is or may be close to chance; nothing if
    scores come from elsewhere."""
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
        ranking, whose = measure_reward_accuracy(models, pairs, run.plan, loaded), ""
    if ranking is None:
        measure = f"surefoot evaluate reward {shlex.quote(named)} PAIRS"
        notify(
            f"caution: how often the reward model prefers the better answer is not known here: {measure} measures it"
        )
        return
    doubtful = ranking.caution
    notify(f"{'caution: ' if doubtful else ''}on held-out pairs{whose}, {doubtful or ranking}", caution=bool(doubtful))


def measure_reward_accuracy(models: PPOModels, pairs: TokenizedDataset, plan: RunPlan, loaded: LoadedModels) -> Ranking:
    """Measure how often the reward model prefers the better answer.

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


def _held_out_pairs(run: RunInputs) -> TokenizedDataset | None:
    """Return the pairs of the evaluation data; None if there is none, or its records are not pairs."""
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
    """Read the full records, not only prompts (`format: prompts`), because pairs are needed here."""

    def read(group: Any) -> Any:
        if not isinstance(group, tuple):
            return group
        return tuple(one.model_copy(update={"format": "auto"}) if one.format == "prompts" else one for one in group)

    layout = "auto" if data.format == "prompts" else data.format
    return data.model_copy(update={"train": read(data.train), "eval": read(data.eval), "format": layout})
