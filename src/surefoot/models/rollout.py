"""Answers of the policy to learn from, with how likely each token was when it was drawn.

An engine is anything with `answer`. `EmbeddedRollouts` runs the policy itself; `vllm_client` asks a vLLM server.

The log-probability that counts is the one at the temperature, among all tokens: at a temperature T the policy that
draws is softmax(logits / T), and that is the policy which PPO improves, so old and new log-probabilities must both be
taken there. top_p < 1 draws from a part of that distribution alone, which the ratio of PPO does not know: the reported
log-probabilities are those before the cut, and importance weights are then an approximation.

An answer is a function of the weights, its prompt, the seed and its place, not of what else is in its batch: tokens
are equal, log-probabilities within rounding, however the prompts are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from surefoot.models.generate import Decoding, draw_steps
from surefoot.models.modes import evaluating


@dataclass(frozen=True)
class Rollout:
    """prompt, response: token ids; the response ends with its stop token, where it has one. stopped: by that, not by
    the limit. logprobs: of each response token at the temperature, before top_p; None where the engine cannot tell. A
    model that has lost its way gives numbers that are not finite: they are handed on."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool
    logprobs: tuple[float, ...] | None


class Rollouts(Protocol):
    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        """One for each prompt (token ids, at least one), in their order. places: number each prompt among those of all
        ranks, so that its draws are its own; None: their order here."""
        ...


class EmbeddedRollouts:
    """The policy in this process, with a key-value cache. rows: prompts in a batch; prompts of like length go together.
    context: autocast as in training, or nothing. keep_going: see `generate.draw_steps`; it is asked before every batch
    as well, so that ranks with fewer prompts go along until the last has answered its own."""

    def __init__(
        self,
        policy: nn.Module,
        rows: int,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        keep_going: Callable[[bool], bool] = bool,
    ):
        self._policy, self._rows, self._context, self._keep_going = policy, rows, context, keep_going

    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        numbers = range(len(prompts)) if places is None else places
        waiting = sorted(range(len(prompts)), key=lambda one: len(prompts[one]))
        answers: dict[int, Rollout] = {}
        with evaluating(self._policy):
            while self._keep_going(bool(waiting)):
                batch = [waiting.pop() for _ in range(min(self._rows, len(waiting)))]  # the longest first
                found = self._batch([prompts[one] for one in batch], [numbers[one] for one in batch], decoding)
                answers.update(zip(batch, found, strict=True))
        return [answers[one] for one in range(len(prompts))]

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Sequence[int]], places: Sequence[int], decoding: Decoding) -> list[Rollout]:
        """No prompts: the steps of the other ranks."""
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        with self._context():
            for drawn in draw_steps(self._policy, prompts, decoding, places=places, keep_going=self._keep_going):
                for row, token, likely in zip(drawn.rows, drawn.tokens, drawn.logprobs, strict=True):
                    tokens[row].append(token)
                    logprobs[row].append(likely)
        return [
            Rollout(tuple(prompt), tuple(ids), bool(ids) and ids[-1] in decoding.stop_ids, tuple(likely))
            for prompt, ids, likely in zip(prompts, tokens, logprobs, strict=True)
        ]
