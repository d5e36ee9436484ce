"""What each method computes, by the name that the config's `stage` gives it."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.method_facts.losses import joined
from surefoot.method_facts.methods import METHODS
from surefoot.methods.examples import prepare_examples
from surefoot.methods.method import MethodFunctions
from surefoot.methods.ppo.models import build_ppo
from surefoot.methods.ppo.start import start_ppo
from surefoot.methods.ppo.task import ppo_task, prepare_ppo
from surefoot.methods.preference import dpo_task, kto_task, start_dpo, start_kto
from surefoot.methods.reward import build_reward, reward_task
from surefoot.methods.sft import sft_task

FUNCTIONS: Mapping[str, MethodFunctions] = joined(
    METHODS,
    {
        "pretrain": MethodFunctions(prepare_examples, sft_task),
        "sft": MethodFunctions(prepare_examples, sft_task),
        "reward": MethodFunctions(prepare_examples, reward_task, build_reward),
        "dpo": MethodFunctions(prepare_examples, dpo_task, start=start_dpo),
        "kto": MethodFunctions(prepare_examples, kto_task, start=start_kto),
        "ppo": MethodFunctions(prepare_ppo, ppo_task, build_ppo, start_ppo),
    },
)
