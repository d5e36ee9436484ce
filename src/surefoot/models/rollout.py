"""Answers of the policy to learn from, with how likely each token was when it was drawn.

An engine is anything with `answer`. `EmbeddedRollouts` runs the policy itself; `surefoot.models.vllm` asks a vLLM
server over HTTP, because vLLM pins a torch of its own and so stays out of this process.

The log-probability that counts is the one at the temperature: at a temperature T the policy that draws is
softmax(logits / T), and that is the policy which is improved, so old and new log-probabilities are both taken there.
top_p and top_k draw from a part of that distribution alone. `Decoding.among_kept` asks for probabilities among that
part, which is told as well; without it they are those among all tokens, and a ratio of them is an approximation (PPO).

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
from surefoot.models.modes import eval_mode


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy.

    prompt, response: token ids; the response ends with its stop token, where it has one.
    stopped: by that, not by the limit.
    logprobs: of each response token at the temperature, among all tokens or among `kept`, as was asked for; None where
        the engine cannot tell. A model that has lost its way gives numbers that are not finite: they are handed on.
    kept: of each response token those that could be drawn in its place; None where it was not asked for, or all could.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool
    logprobs: tuple[float, ...] | None
    kept: tuple[tuple[int, ...], ...] | None = None


class Rollouts(Protocol):
    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        """One for each prompt (token ids, at least one), in their order.

        places: number each prompt among those of all ranks, so that its draws are its own; None: their order here.
        """
        ...


class EmbeddedRollouts:
    """The policy in this process, with a key-value cache.

    rows: prompts in a batch; prompts of like length go together.
    context: autocast as in training, or nothing.
    keep_going: see `generate.draw_steps`; it is called before every batch as well, so that ranks with fewer prompts go
        along until the last has answered its own.
    """

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
        with eval_mode(self._policy):
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
        kept: list[list[tuple[int, ...]]] | None = (
            [[] for _ in prompts] if decoding.among_kept and decoding.cuts else None
        )
        with self._context():
            for drawn in draw_steps(self._policy, prompts, decoding, places=places, keep_going=self._keep_going):
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
