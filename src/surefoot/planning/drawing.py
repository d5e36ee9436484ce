"""How many answers a process draws at once, and the memory that they take.

Drawing keeps keys and values of all layers, in buffers with up to half more room (`surefoot.models.kv_cache`), and the
prompts go through one layer at a time. Every decoding step reads all weights once, whatever the number of rows, so as
many are drawn together as fit. Where the layers of an update are computed again, an answer takes more while it is drawn
than while it is learned from. Neither gradients nor activations exist meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import replace

from surefoot.config.schema import RunConfig
from surefoot.planning.memory import layer_bytes, usable
from surefoot.planning.plan import MemoryPlan
from surefoot.planning.workload import Workload

AT_ONCE = 8
"""How many times more rows are drawn at once than are trained on, if memory allows it."""
_ROOM = 1.5
_WORKING = 0.5  # of what a layer keeps for its backward pass, while it runs without one
_LOGITS = 6  # fp32 numbers for each logit of the last position: sampling sorts and sums them


def with_answers(config: RunConfig, work: Workload, longest: int) -> Workload:
    """Return the workload with the answers that this process draws.

    longest: tokens of the longest prompt with its answer.
    """
    if not config.draws or config.rollout.engine != "embedded":
        return work
    prompt = max(1, longest - config.rollout.max_new_tokens)
    alike = getattr(config.rollout, "group", 1)  # answers of one prompt, which is read once
    kept, layer = _ROOM * _cached_bytes(work), _WORKING * layer_bytes(work, prompt, prompt)
    row = max(kept * prompt + layer / alike, kept * longest) + 4 * _LOGITS * work.model.vocab
    # An evaluation may draw more of them.
    answers = config.batch.size * getattr(config.rollout, "rollout_batches", 1) if config.data.eval == "none" else None
    return replace(work, answer=int(row), answers=answers)


def _cached_bytes(work: Workload) -> int:
    """Bytes of keys and values of a token, in all layers."""
    model = work.model
    made = [one.linear[1] for one in model.layer_linears if one.linear and one.name.endswith(("k_proj", "v_proj"))]
    return work.width * (sum(made) or 2 * model.layers * model.kv_heads * model.head_dim * model.attends)


def with_drawing(memory: MemoryPlan, work: Workload, examples: int, world: int) -> MemoryPlan:
    """Return the forecast with the answers that are drawn at once.

    memory: forecast of an update in micro-batches of `examples`, of one of `world` ranks.
    """
    if not work.answer:
        return memory
    most = AT_ONCE * examples
    if work.answers is not None:
        most = min(most, math.ceil(work.answers / world))
    update = memory.gradients + memory.activations + memory.logits + memory.holes - memory.apart
    rows = max(1, min(most, (usable(memory.available) - memory.total + update) // work.answer))
    return replace(memory, drawn=rows, drawing=max(0, rows * work.answer - update))
