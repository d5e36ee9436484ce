"""Host memory of `grpo.ahead`: answers that wait for their update, and the weights that drew them.

A server draws while the policy is updated. The weights that drew are needed when its answers are scored, so a copy of
all trained ones is kept (`surefoot.methods.grpo.alongside`), and one more tensor while they are exchanged. The embedded
engine draws before the update and keeps no copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.config.schema import RunConfig
from surefoot.planning.optimizer import Tensor
from surefoot.planning.parallel import shared_parts
from surefoot.planning.plan import ParallelPlan
from surefoot.planning.workload import Workload

_ID = 8 + 28  # bytes of a token id: a place in a tuple, and Python's number there
_LOGPROB = 8 + 24
_TUPLE = 8 + 40


def draws_alongside(engine: str, parallel: ParallelPlan) -> bool:
    """Whether answers are drawn while this process trains: a server's take none of its models, and weights that every
    process has whole can be kept for them. engine: of rollouts."""
    return engine == "vllm" and "weights" not in shared_parts(parallel.engine.value, parallel.zero_stage)


def ahead_bytes(
    config: RunConfig, work: Workload, parallel: ParallelPlan, tensors: Iterable[Tensor], longest: int
) -> int:
    """Return the bytes that every process keeps; 0 if nothing is drawn in advance.

    tensors: all trained parameters.
    longest: tokens of the longest prompt with its answer.
    """
    grpo = config.grpo
    if not grpo.ahead:
        return 0
    kept = _TUPLE + _ID * grpo.top_k if grpo.top_k else 0
    of_answer = _ID * longest + (_LOGPROB + kept) * grpo.max_new_tokens
    answers = grpo.ahead * grpo.rollout_batches * config.batch.size * of_answer
    if not draws_alongside(grpo.engine, parallel):
        return answers
    width = work.width if work.narrow else 4
    largest = max((one.numbers * (width if one.inside else 4) for one in tensors), default=0)
    return answers + 4 * work.trainable - work.narrow * (4 - work.width) + largest
