"""The stages by the name that the config gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.methods.examples import prepare_examples
from surefoot.methods.method import Say, StageKind
from surefoot.methods.ppo.models import build_ppo
from surefoot.methods.ppo.stage import ppo_stage, prepare_ppo
from surefoot.methods.ppo.start import start_ppo
from surefoot.methods.preference import dpo_stage, kto_stage, start_dpo, start_kto
from surefoot.methods.reward import build_reward, reward_stage
from surefoot.methods.sft import sft_stage

if TYPE_CHECKING:
    from surefoot.runs.prepared import Prepared
    from surefoot.runs.setup import Setup

KINDS: dict[str, StageKind] = {
    "pretrain": StageKind(prepare_examples, sft_stage),
    "sft": StageKind(prepare_examples, sft_stage),
    "reward": StageKind(prepare_examples, reward_stage, build_reward, unit="pairs"),
    "dpo": StageKind(prepare_examples, dpo_stage, start=start_dpo, unit="pairs"),
    "kto": StageKind(prepare_examples, kto_stage, start=start_kto, unit="answers"),
    "ppo": StageKind(prepare_ppo, ppo_stage, build_ppo, start_ppo, unit="response_tokens"),
}


def with_models(run: Prepared, setup: Setup, say: Say) -> Prepared:
    """The run whose stage has its models, which it may run. say: also during the steps."""
    start = KINDS[run.config.stage].start
    return run if start is None else replace(run, stage=start(run, setup, say))
