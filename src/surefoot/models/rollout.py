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
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from surefoot.data.batching.rollouts import drawn_count
from surefoot.data.formats.conversation import Picture
from surefoot.data.tokenize.picture_processor import PictureProcessor
from surefoot.models.generate import Decoding, Pictures, draw_steps, pictures_of
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


Seen = tuple[Sequence[int], tuple[Picture, ...]]  # a prompt, and its pictures


@dataclass(frozen=True)
class Shown:
    """The pictures of a rank's prompts.

    pictures: of each prompt; () for one without.
    processor: makes their pixels.
    stand_in: a prompt of any rank, which this rank computes while others see and it has none left: they may wait for
        each other in the vision tower.
    """

    pictures: Sequence[tuple[Picture, ...]]
    processor: PictureProcessor
    stand_in: Seen


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
        shown: Shown | None = None,
    ) -> list[Rollout]:
        """Return one answer per prompt (token ids, at least one), in order.

        places: number of each prompt among those of all ranks, which selects its random stream; None: the order here.
        limits: maximum tokens of each answer, none above decoding.max_new_tokens; None: that for all.
        arrived: called with each answer and its index as soon as it is there, from any thread.
        shown: None if no prompt of any rank has a picture.
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
        shown: Shown | None = None,
    ) -> list[Rollout]:
        numbers = range(len(prompts)) if places is None else places
        most = [decoding.max_new_tokens] * len(prompts) if limits is None else limits
        waiting = sorted(range(len(prompts)), key=lambda one: len(prompts[one]))
        answers: dict[int, Rollout] = {}
        if shown is not None:
            # The model would take one for a picture when the answer is learned.
            decoding = replace(decoding, never=(shown.processor.token_id,))
        with eval_mode(self._policy):
            # Not `while waiting`: with sharded weights a rank without prompts must still take part in the others'
            # passes.
            while self._keep_going(bool(waiting)):
                batch, pictures, idle = self._next(waiting, prompts, shown)
                own = [prompts[one] for one in batch]
                how = {"places": [numbers[one] for one in batch], "limits": [most[one] for one in batch]}
                found = self._batch(own, decoding, **how, pictures=pictures, idle=idle)
                answers.update(zip(batch, found, strict=True))
                for one in batch:
                    arrived(one, answers[one])
                self._on_progress(len(answers), len(prompts))
        return [answers[one] for one in range(len(prompts))]

    def _next(
        self, waiting: list[int], prompts: Sequence[Sequence[int]], shown: Shown | None
    ) -> tuple[list[int], Pictures | None, Sequence[int] | None]:
        """Take the next batch from `waiting`, the longest first: with pictures the answers to one prompt, before all
        prompts without. Returns it with the image inputs, and the prompt for a rank that has none left."""
        if shown is None or not self._keep_going(any(shown.pictures[one] for one in waiting)):
            return [waiting.pop() for _ in range(min(self._rows, len(waiting)))], None, None
        seeing = [((prompts[one], shown.pictures[one]), one) for one in reversed(waiting) if shown.pictures[one]]
        asked, pictures = seeing[0][0] if seeing else shown.stand_in
        batch = [one for seen, one in seeing if seen == (asked, pictures)][: self._rows]
        for one in batch:
            waiting.remove(one)
        pixels = shown.processor.pixels(pictures)
        return batch, pictures_of(self._policy, asked, pixels, shown.processor.token_id), asked

    @torch.no_grad()
    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        places: Sequence[int],
        limits: Sequence[int],
        pictures: Pictures | None,
        idle: Sequence[int] | None,
    ) -> list[Rollout]:
        """Take part in the steps of the other ranks without own prompts."""
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        kept: list[list[tuple[int, ...]]] | None = (
            [[] for _ in prompts] if decoding.among_kept and decoding.cuts else None
        )
        with self._context():
            steps = draw_steps(
                self._policy,
                prompts,
                decoding,
                places=places,
                limits=limits,
                keep_going=self._keep_going,
                pictures=pictures,
                idle=idle,
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
