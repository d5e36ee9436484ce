"""The functions of each method, by the value of the config's `stage`.

Each row imports its modules when it is used, so a run loads only those of its method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from surefoot.method_facts.losses import joined
from surefoot.method_facts.methods import METHODS
from surefoot.methods.examples import prepare_examples, sft_task
from surefoot.methods.method import LoadedModels, MethodFunctions, Notify, RunInputs, Task


def functions_of(method: str) -> MethodFunctions:
    """Return the functions of a method, a key of `FUNCTIONS`."""
    return FUNCTIONS[method]()


def _sft() -> MethodFunctions:
    return MethodFunctions(prepare_examples, sft_task, start=_start_tokens)


def _start_tokens(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Give a loss of tokens its reference, if it has one."""
    if not run.config.needs_reference:
        return run.task
    from surefoot.methods.reference import start_anchored

    return start_anchored(run, loaded)


def _reward() -> MethodFunctions:
    from surefoot.methods.reward import build_reward, reward_task

    return MethodFunctions(prepare_examples, reward_task, build_reward)


def _dpo() -> MethodFunctions:
    from surefoot.methods.preference import dpo_task, start_dpo

    return MethodFunctions(prepare_examples, dpo_task, start=start_dpo)


def _kto() -> MethodFunctions:
    from surefoot.methods.preference import kto_task, start_kto

    return MethodFunctions(prepare_examples, kto_task, start=start_kto)


def _ppo() -> MethodFunctions:
    from surefoot.methods.ppo.models import build_ppo
    from surefoot.methods.ppo.start import start_ppo
    from surefoot.methods.ppo.task import ppo_task, prepare_ppo

    return MethodFunctions(prepare_ppo, ppo_task, build_ppo, start_ppo)


def _grpo() -> MethodFunctions:
    from surefoot.methods.grpo.reward_models import build_grpo
    from surefoot.methods.grpo.start import start_grpo
    from surefoot.methods.grpo.task import grpo_task, prepare_grpo

    return MethodFunctions(prepare_grpo, grpo_task, build_grpo, start_grpo)


def _distill() -> MethodFunctions:
    from surefoot.methods.distill.task import distill_task, prepare_distill, start_distill

    return MethodFunctions(prepare_distill, distill_task, start=start_distill)


FUNCTIONS: Mapping[str, Callable[[], MethodFunctions]] = joined(
    METHODS,
    {
        "pretrain": _sft,
        "sft": _sft,
        "reward": _reward,
        "dpo": _dpo,
        "kto": _kto,
        "ppo": _ppo,
        "grpo": _grpo,
        "distill": _distill,
    },
    ("method_facts.methods.METHODS", "methods.table.FUNCTIONS"),
)
