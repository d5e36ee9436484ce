"""What writes the answers of stage ppo: the policy in this process, or a vLLM server that is told of its weights."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.config.schema import RunConfig
from surefoot.methods.policy import write_policy
from surefoot.models.rollout import EmbeddedRollouts, Rollouts, VllmRollouts
from surefoot.planning.plan import RunPlan
from surefoot.system.posting import server

if TYPE_CHECKING:
    from surefoot.runs.setup import Setup

# Answers are written so many times as many at once as are learned from: a token's keys and values are less than an
# eighth of what a layer keeps of it for the backward pass, and every step of decoding reads all weights once.
_ROWS = 8


@dataclass(frozen=True)
class RolloutEngine:
    """follow: makes it answer with the policy as it is now; to be called before answers are asked for."""

    rollouts: Rollouts
    follow: Callable[[], None]


def rollout_engine(config: RunConfig, plan: RunPlan, setup: Setup) -> RolloutEngine:
    """Raises EnvironmentFault where a server does not answer."""
    engine = setup.engine
    if config.ppo.engine == "embedded":
        rollouts = EmbeddedRollouts(
            setup.policy,
            _ROWS * plan.batch.micro.value,
            setup.settings.forward,
            lambda own: bool(engine.totals([own])[0]),
        )
        return RolloutEngine(rollouts, lambda: None)
    assert engine.world == 1, "the plan refuses a server beside several processes"
    assert config.ppo.vllm_url is not None, "config.contradictions asks for it"
    client = VllmRollouts(server(config.ppo.vllm_url, "ppo.vllm_url"))

    def follow() -> None:
        with tempfile.TemporaryDirectory(prefix=".policy-", dir=config.output) as folder:
            write_policy(setup.policy, plan, Path(folder))
            client.synchronise(Path(folder), f"surefoot-{uuid.uuid4().hex}")

    return RolloutEngine(client, follow)
