"""What a policy answered and what came of it: episodes, and batches of them to learn from.

An episode is a prompt with one answer. Its numbers stand beside the answer's tokens, in their order, so a batch holds
them flat in the order of its supervised places.

Shapes: N response tokens of a batch, n of one episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from surefoot.data.batch import Batch, Example, RecordName, collate


@dataclass(frozen=True)
class Episode:
    """place: in its rollout. prompt, response: token ids; the response ends with its stop token, where it has one.
    logprobs: of the response's tokens under the policy that is about to learn; values: of the state before each;
    advantages, returns: of each. All [n] fp32 on the CPU. number: the prompt's record."""

    place: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    number: RecordName
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@dataclass(frozen=True)
class PpoBatch:
    """rows: prompts with their answers, padded on the right; targets are the answers' tokens. old_logprobs, advantages,
    returns, old_values: [N] fp32, in the order of the supervised places of `rows`. text: examples whose
    language-modelling loss is mixed in. text_share: response tokens of the whole step / supervised tokens of its texts,
    by which a sum over the latter becomes a mean over them where it stands beside a sum over response tokens; 0
    beside a blank text."""

    rows: Batch
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    text: Batch | None = None
    text_share: float = 0.0

    @property
    def weight(self) -> int:
        """Response tokens."""
        return self.rows.weight

    @property
    def tokens(self) -> int:
        return self.rows.tokens + (0 if self.text is None else self.text.tokens)

    @property
    def examples(self) -> tuple[RecordName, ...]:
        return self.rows.examples

    def to(self, device: torch.device) -> PpoBatch:
        return replace(
            self,
            rows=self.rows.to(device),
            old_logprobs=self.old_logprobs.to(device, non_blocking=True),
            advantages=self.advantages.to(device, non_blocking=True),
            returns=self.returns.to(device, non_blocking=True),
            old_values=self.old_values.to(device, non_blocking=True),
            text=None if self.text is None else self.text.to(device),
        )

    def blank(self) -> PpoBatch:
        return replace(self, rows=self.rows.blank(), text=None if self.text is None else self.text.blank())


def answered_rows(answers: Sequence[tuple[Sequence[int], Sequence[int], RecordName]], pad_id: int) -> Batch:
    """Prompt, response and record of each -> rows whose targets are the responses' tokens."""
    return collate([_example(prompt, response, number) for prompt, response, number in answers], pad_id)


def episode_batches(episodes: Sequence[Episode], micro: int, pad_id: int) -> list[PpoBatch]:
    """Batches of at most `micro` episodes each, longest first; episodes of one length keep their order."""
    by_length = sorted(episodes, key=lambda one: len(one.prompt) + len(one.response), reverse=True)
    return [_batch(by_length[start : start + micro], pad_id) for start in range(0, len(by_length), micro)]


def with_texts(batches: Sequence[PpoBatch], texts: Sequence[Batch]) -> list[PpoBatch]:
    """The batches of one step, each with its share of the texts, of which there are at most as many. Batches beyond the
    last text have a blank copy of it that counts nothing: ranks that share weights wait for each other in every forward
    pass, so all of them must have as many."""
    supervised = sum(text.weight for text in texts)
    if not supervised:
        return list(batches)
    share = sum(batch.weight for batch in batches) / supervised
    beside = [(text, share) for text in texts]
    beside += [(texts[-1].blank(), 0.0)] * (len(batches) - len(texts))
    return [replace(batch, text=text, text_share=share) for batch, (text, share) in zip(batches, beside, strict=True)]


def _example(prompt: Sequence[int], response: Sequence[int], number: RecordName) -> Example:
    ids = np.array([*prompt, *response], dtype=np.int64)
    return Example(ids, np.arange(len(ids)) >= len(prompt), number)


def _batch(episodes: Sequence[Episode], pad_id: int) -> PpoBatch:
    return PpoBatch(
        answered_rows([(one.prompt, one.response, one.number) for one in episodes], pad_id),
        torch.cat([one.logprobs for one in episodes]),
        torch.cat([one.advantages for one in episodes]),
        torch.cat([one.returns for one in episodes]),
        torch.cat([one.values for one in episodes]),
    )
