"""What every method that answers prompts shares: the engine that writes the answers, and answers known to all ranks.

Answers are written by the policy in this process or by a vLLM server that is sent its weights (`rollout_engine`). Every
rank answers the prompts of its own places; then all ranks know all answers (`answers_of_all`), so that each can share
out and compute the same numbers from them.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Batch, RecordName
from surefoot.data.batching.order import ANSWERS, EVALUATIONS
from surefoot.data.batching.rollouts import answered_rows
from surefoot.data.tokenize.dataset import TokenisedDataset
from surefoot.methods.method import LoadedModels
from surefoot.methods.policy import write_policy
from surefoot.models.rollout import EmbeddedRollouts, Rollout, Rollouts
from surefoot.models.vllm import VllmRollouts
from surefoot.planning.plan import RunPlan
from surefoot.system.posting import server
from surefoot.training.ranks import gather_rows


@dataclass(frozen=True)
class Prompts:
    """The prompts of a rollout: token ids and records."""

    ids: Sequence[tuple[int, ...]]
    records: Sequence[RecordName]


Write = Callable[[Sequence[tuple[int, ...]], Sequence[int]], Sequence[Rollout]]  # prompts, their places -> answers
Totals = Callable[[Sequence[float]], list[float]]


def prompts_at(data: TokenisedDataset, places: Sequence[int] | np.ndarray) -> Prompts:
    """places: in the data."""
    examples = [data[int(place)] for place in places]
    return Prompts([tuple(one.ids.tolist()) for one in examples], [one.number for one in examples])


def answer_seed(seed: int, rollout: int, attempt: int = 0) -> int:
    """Of the rollout's draws; each of its answers has a stream of its own under it.

    attempt: from 1 on of answers to other prompts, which take the place of the rollout's own.
    """
    stream = (ANSWERS, rollout, attempt) if attempt else (ANSWERS, rollout)
    words = np.random.SeedSequence(seed, spawn_key=stream).generate_state(2, np.uint64)
    return int(words[0])


def evaluation_seed(seed: int) -> int:
    """Of the draws of every evaluation, which are the same so that evaluations can be compared."""
    return int(np.random.SeedSequence(seed, spawn_key=(EVALUATIONS,)).generate_state(2, np.uint64)[0])


def answers_of_all(
    prompts: Sequence[tuple[int, ...]], written: Sequence[Rollout], places: Sequence[int], totals: Totals
) -> tuple[Rollout, ...]:
    """The answers of all ranks, in the order of the prompts.

    written: this rank's, of the prompts at `places`.

    Every rank must ask.
    """
    own = {place: _to_row(answer) for place, answer in zip(places, written, strict=True)}
    rows = gather_rows(own, len(prompts), totals)
    return tuple(_from_row(prompt, row) for prompt, row in zip(prompts, rows, strict=True))


def answered_batches(answers: Sequence[Rollout], micro: int, pad_id: int) -> Iterator[Batch]:
    """Prompts with their answers, longest first; an example's number is its place. Answers without a token are left
    out."""
    answered = [place for place, answer in enumerate(answers) if answer.response]
    answered.sort(key=lambda place: len(answers[place].prompt) + len(answers[place].response), reverse=True)
    for start in range(0, len(answered), micro):
        chosen = answered[start : start + micro]
        yield answered_rows([(answers[place].prompt, answers[place].response, place) for place in chosen], pad_id)


def as_table(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    """[E, width], with 0 behind the end of a row."""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def _to_row(answer: Rollout) -> list[float]:
    row = [float(answer.stopped), float(len(answer.response)), *map(float, answer.response), *(answer.logprobs or ())]
    for place in answer.kept or ():
        row += [float(len(place)), *map(float, place)]
    return row


def _from_row(prompt: tuple[int, ...], row: Sequence[float]) -> Rollout:
    stopped, size, *rest = row
    end = int(size)
    response, logprobs, more = rest[:end], rest[end : 2 * end], rest[2 * end :]
    kept: list[tuple[int, ...]] = []
    start = 0
    while start < len(more):
        begin, start = start + 1, start + 1 + int(more[start])
        kept.append(tuple(map(int, more[begin:start])))
    return Rollout(prompt, tuple(map(int, response)), bool(stopped), tuple(logprobs) or None, tuple(kept) or None)


# Answers are written so many times as many at once as are learned from: a token's keys and values are less than an
# eighth of what a layer keeps of it for the backward pass, and every step of decoding reads all weights once.
_ROWS = 8


@dataclass(frozen=True)
class RolloutEngine:
    """What writes a rollout's answers.

    follow: makes it answer with the policy as it is now; to be called before answers are asked for.
    """

    rollouts: Rollouts
    follow: Callable[[], None]


def rollout_engine(config: RunConfig, plan: RunPlan, loaded: LoadedModels) -> RolloutEngine:
    """Raises EnvironmentFault where a server does not answer."""
    engine, section = loaded.engine, config.rollout
    if section.engine == "embedded":
        rollouts = EmbeddedRollouts(
            loaded.policy,
            _ROWS * plan.batch.micro.value,
            loaded.settings.forward,
            lambda own: bool(engine.totals([own])[0]),
        )
        return RolloutEngine(rollouts, lambda: None)
    assert engine.world == 1, "the plan refuses a server beside several processes"
    assert section.vllm_url is not None, "config.contradictions asks for it"
    client = VllmRollouts(server(section.vllm_url, f"{config.method.section}.vllm_url"))

    def follow() -> None:
        with tempfile.TemporaryDirectory(prefix=".policy-", dir=config.output) as folder:
            write_policy(loaded.policy, plan, Path(folder))
            client.synchronise(Path(folder), f"surefoot-{uuid.uuid4().hex}")

    return RolloutEngine(client, follow)
