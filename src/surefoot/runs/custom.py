"""Functions of the user: a loss, metrics, a reward, a record reader.

A Python caller passes functions; a config names them (`functions`, see `surefoot.methods.own_functions`). surefoot
cannot inspect them, so a resumed run must be given the same ones. For a named loss the content of its file is compared,
and records are compared by their content, like all data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Weighted
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.methods.method import LoadedModels, RewardFunction
from surefoot.methods.own_functions import identity, name_of, own_function, passed_name
from surefoot.report.trainer_log import EVAL_FIELDS
from surefoot.runs.parity.passes import with_stand_ins
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_word
from surefoot.training.evaluation import METRICS, Metric
from surefoot.training.objective import LossSum, Objective


@dataclass(frozen=True)
class Custom:
    """The user's functions.

    objective: replaces the stage's loss.
    metrics: by the name used in metrics.names.
    read_record: reads records of sources with `format: custom`; returns messages or a text.
    reward: scores answers in stage ppo; called with prompts and responses, returns one number per answer.
    named_loss: identity of an objective or pair loss that the config names.
    """

    objective: Objective | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    read_record: ReadRecord | None = None
    reward: RewardFunction | None = None
    named_loss: str | None = None

    @property
    def objective_name(self) -> str | None:
        """Name by which a resumed run recognizes the objective."""
        return self.named_loss if self.objective is None or self.named_loss else passed_name(self.objective)

    @property
    def all_metrics(self) -> Mapping[str, Metric]:
        """The user's metrics and surefoot's."""
        return {**METRICS, **self.metrics}


NOTHING = Custom()


def with_named(config: RunConfig, custom: Custom = NOTHING) -> Custom:
    """Combine the functions that a Python caller passes with those that the config names.

    Raises InputError for a function that does not exist, and for a loss that is given twice.
    """
    named = config.functions
    metrics = {name_of(one): own_function(one, "functions.metrics") for one in named.metrics}
    found = replace(custom, metrics={**metrics, **custom.metrics})
    pairs = config.loss_name
    if pairs is not None and pairs not in config.method.losses:
        found = replace(found, named_loss=identity(pairs))
    if named.loss is None:
        return found
    if custom.objective is not None:
        what = f"the loss is given twice: {named.loss} and {custom.objective_name}"
        raise InputError(Fault("functions.loss", what, "give one of them", code="SF-CONFIG-CONFLICT"))
    return replace(found, objective=own_function(named.loss, "functions.loss"), named_loss=identity(named.loss))


def in_python(config: RunConfig, custom: Custom) -> list[str]:
    """Return the arguments that brought what takes part in the run and no config names."""
    named = config.functions
    own = {
        "objective": custom.objective is not None and named.loss is None,
        "metrics": bool(custom.metrics.keys() - {name_of(one) for one in named.metrics}),
        "read_record": custom.read_record is not None,
        "reward": custom.reward is not None,
    }
    return [argument for argument, given in own.items() if given]


_RESERVED = (
    "step",
    "none",
    *(field.removeprefix("eval_") for field in EVAL_FIELDS),
)  # columns and words that surefoot uses itself


def custom_faults(config: RunConfig, custom: Custom) -> list[Fault]:
    """Return the conflicts between the config and the caller's functions."""
    return [
        *_metric_faults(config, custom.all_metrics),
        *_reward_faults(config, custom.reward),
        *_loss_faults(config, custom),
    ]


def _loss_faults(config: RunConfig, custom: Custom) -> list[Fault]:
    """A loss of the user's where the stage's own compares tokens with another model's, which a function of model and
    batch never sees."""
    compares = config.method.teacher or (config.method.learns_tokens and config.needs_reference)
    if custom.objective is None or not compares:
        return []
    what = f"replaces the comparison with the {'teacher' if config.method.teacher else 'model before training'}"
    fix = "leave it out, or choose stage: sft with its usual loss"
    where = "functions.loss" if config.functions.loss else "objective"
    return [Fault(where, what, fix, code="SF-CONFIG-CONFLICT")]


def _metric_faults(config: RunConfig, known: Mapping[str, Metric]) -> list[Fault]:
    """Metrics that do not exist, or whose name is reserved."""
    faults = []
    for name in config.metrics.names:
        if name in _RESERVED:
            faults.append(
                Fault(
                    "metrics.names",
                    f"{name!r} is a reserved name",
                    "choose another",
                    code="SF-OWN-FUNCTION",
                )
            )
        elif name not in known:
            near = nearest_word(name, list(known))
            fix = f"did you mean {near}?" if near else f"there are {', '.join(known)}; Python callers may bring more"
            faults.append(Fault("metrics.names", f"no metric is called {name!r}", fix, code="SF-OWN-FUNCTION"))
    return faults


def _reward_faults(config: RunConfig, reward: RewardFunction | None) -> list[Fault]:
    """A stage with rollouts without a reward, ppo with two, or a reward for another stage."""
    if config.method.rollouts and not config.method.critic:
        if config.grpo.rewards or config.grpo.environment is not None or reward is not None:
            return []
        fix = "name some, such as [numeric]; from Python pass reward="
        return [Fault("grpo.rewards", f"stage {config.stage} needs a reward for its answers", fix, code="SF-REWARD")]
    named = config.ppo.reward is not None
    if config.method.rollouts and not named and reward is None:
        what = "stage ppo needs a score for its answers"
        fix = "name a reward model, FILE.py:FUNCTION or an http address; from Python pass reward="
        return [Fault("ppo.reward", what, fix, code="SF-OWN-FUNCTION")]
    if reward is not None and (named or not config.method.rollouts):
        what = f"{config.ppo.reward} scores already" if named else f"is for stages ppo and grpo, not {config.stage}"
        return [Fault("reward", what, "give one of them" if named else "leave it out", code="SF-OWN-FUNCTION")]
    return []


def check_objective(config: RunConfig, objective: Objective, loaded: LoadedModels, batch: Weighted) -> None:
    """Run one forward pass as in evaluation. Raises InputError if the objective does not return a LossSum, or its sums
    use reserved names."""
    _, batch = with_stand_ins(objective, batch, loaded.engine.device, loaded.plan)
    with torch.no_grad(), loaded.settings.kernels(), loaded.settings.forward():
        found = objective(loaded.model, batch)
    if not isinstance(found, LossSum) or not isinstance(found.loss, torch.Tensor) or found.loss.ndim:
        what = f"returned {type(found).__name__}, not LossSum(loss) with the sum as a tensor of no dimensions"
        raise InputError(Fault("objective", what, "see docs/python.md", code="SF-OWN-FUNCTION"))
    reserved = {*_RESERVED, *config.metrics.names}
    faults = [
        Fault(
            "objective",
            f"sums[{name!r}] has a reserved name",
            "choose another",
            code="SF-OWN-FUNCTION",
        )
        for name in found.sums
        if name in reserved
    ]
    if faults:
        raise InputError(faults)
