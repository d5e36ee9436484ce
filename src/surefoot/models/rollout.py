"""Generate answers of the policy with the log-probability of each sampled token.

An engine is any object with `answer`. `EmbeddedRollouts` runs the policy itself; `surefoot.models.vllm` uses a vLLM
server over HTTP, because vLLM pins another version of torch and so cannot run in this process.

At a temperature T the sampling policy is softmax(logits / T), and this policy is trained, so old and new
log-probabilities are both computed at T. top_p and top_k sample from a part of that distribution. With
`Decoding.among_kept`, probabilities are renormalized over that part, and its tokens are returned too; otherwise they
are over the whole vocabulary, and their ratio is an approximation (PPO).

An answer depends on the weights, its prompt, the seed and its place, not on the rest of its batch: tokens are equal,
and log-probabilities equal up to rounding, however the prompts are split.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from surefoot.data.batching.rollouts import drawn_count
from surefoot.models.generate import Decoding, draw_steps
from surefoot.models.modes import eval_mode


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy.

    prompt, response: token ids; the response ends with its stop token, if it has one.
    stopped: whether it ended with a stop token, not at the limit.
    logprobs: of each sampled token at the temperature, over all tokens or over `kept`, as requested; None if the
        engine does not return them. Non-finite values of a diverged model are returned as they are.
    kept: for each sampled token the tokens that could be sampled at its position; None if not requested, or if all
        could.
    pieces: lengths of the stretches of the response, alternately sampled and given by an environment, beginning and
        ending with a sampled one; () if all was sampled.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool
    logprobs: tuple[float, ...] | None
    kept: tuple[tuple[int, ...], ...] | None = None
    pieces: tuple[int, ...] = ()

    @property
    def drawn(self) -> int:
        """Number of drawn tokens."""
        return drawn_count(self.response, self.pieces)

    @property
    def stretches(self) -> list[tuple[int, ...]]:
        """The tokens of each piece; of the response where all was drawn."""
        ends = list(itertools.accumulate(self.pieces or [len(self.response)]))
        return [self.response[start:end] for start, end in zip([0, *ends], ends, strict=False)]


Arrived = Callable[[int, Rollout], None]


def nothing(place: int, answer: Rollout) -> None:
    """An `Arrived` that does nothing."""


class Rollouts(Protocol):
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        places: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        arrived: Arrived = nothing,
    ) -> list[Rollout]:
        """Return one answer per prompt (token ids, at least one), in order.

        places: number of each prompt among those of all ranks, which selects its random stream; None: the order here.
        limits: maximum tokens of each answer, none above decoding.max_new_tokens; None: that for all.
        arrived: called with each answer and its index as soon as it is there, from any thread.
        """
        ...


class EmbeddedRollouts:
    """The policy in this process, with a key-value cache.

    rows: prompts in a batch; prompts of similar length are batched together.
    context: autocast as in training, or nothing.
    keep_going: see `generate.draw_steps`; also called before every batch, so that ranks with fewer prompts continue
        until the last rank has finished.
    on_progress: called with the number of answers that are finished, and of all, after every batch.
    """

    def __init__(
        self,
        policy: nn.Module,
        rows: int,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        keep_going: Callable[[bool], bool] = bool,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        self._policy, self._rows, self._context, self._keep_going = policy, rows, context, keep_going
        self._on_progress = on_progress

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        places: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        arrived: Arrived = nothing,
    ) -> list[Rollout]:
        numbers = range(len(prompts)) if places is None else places
        most = [decoding.max_new_tokens] * len(prompts) if limits is None else limits
        waiting = sorted(range(len(prompts)), key=lambda one: len(prompts[one]))
        answers: dict[int, Rollout] = {}
        with eval_mode(self._policy):
            # Not `while waiting`: with sharded weights a rank without prompts must still take part in the others'
            # passes.
            while self._keep_going(bool(waiting)):
                batch = [waiting.pop() for _ in range(min(self._rows, len(waiting)))]  # the longest first
                own = [prompts[one] for one in batch]
                found = self._batch(own, [numbers[one] for one in batch], [most[one] for one in batch], decoding)
                answers.update(zip(batch, found, strict=True))
                for one in batch:
                    arrived(one, answers[one])
                self._on_progress(len(answers), len(prompts))
        return [answers[one] for one in range(len(prompts))]

    @torch.no_grad()
    def _batch(
        self, prompts: Sequence[Sequence[int]], places: Sequence[int], limits: Sequence[int], decoding: Decoding
    ) -> list[Rollout]:
        """Take part in the steps of the other ranks without own prompts."""
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        kept: list[list[tuple[int, ...]]] | None = (
            [[] for _ in prompts] if decoding.among_kept and decoding.cuts else None
        )
        with self._context():
            steps = draw_steps(
                self._policy, prompts, decoding, places=places, limits=limits, keep_going=self._keep_going
            )
            for drawn in steps:
                for row, token, likely in zip(drawn.rows, drawn.tokens, drawn.logprobs, strict=True):
                    tokens[row].append(token)
                    logprobs[row].append(likely)
                if kept is not None and drawn.kept is not None:
                    for row, own in zip(drawn.rows, drawn.kept, strict=True):
                        kept[row].append(tuple(own))
        return [
            Rollout(
                tuple(prompt),
                tuple(ids),
                bool(ids) and ids[-1] in decoding.stop_ids,
                tuple(likely),
                None if kept is None else tuple(kept[row]),
            )
            for row, (prompt, ids, likely) in enumerate(zip(prompts, tokens, logprobs, strict=True))
        ]
