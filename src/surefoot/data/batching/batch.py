"""What one forward pass sees: tensors, and how much they weigh.

A stage may have a batch of its own kind; the step asks of each no more than `Weighted` says.

Shapes: B examples, T tokens of the longest one. Targets are already shifted: `targets[b, t]` is the token that
position t must predict, or IGNORE. Padding is masked by position, never by token id, so PAD may equal EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from surefoot.data.formats.conversation import Picture

IGNORE = -100
Pixels = tuple[tuple[str, torch.Tensor], ...]  # of an example's pictures, by argument of the model's forward
RecordName = int | str  # a record's number in its file or, where there are several files, "data/a.json:120"


@dataclass(frozen=True)
class Example:
    """One tokenised example. ids[T] and supervised[T]: True where the token itself is to be learned."""

    ids: np.ndarray
    supervised: np.ndarray
    number: RecordName  # named in logs and errors
    pictures: tuple[Picture, ...] = ()


class Weighted(Protocol):
    """What the step needs of a batch of any kind.

    rows: the sequences that go through the decoder.
    weight: its share of the step's denominator (supervised tokens, pairs, answers, response tokens).
    tokens: real input tokens.
    examples: of which records.
    """

    @property
    def rows(self) -> Batch: ...
    @property
    def weight(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def examples(self) -> tuple[RecordName, ...]: ...
    def to(self, device: torch.device) -> Self: ...
    def blank(self) -> Self:
        """The same tensors without weight, tokens or names: what a rank computes that has nothing of its own to do,
        because others wait for it inside the forward pass. The step multiplies its loss by 0."""
        ...


@dataclass(frozen=True)
class Batch:
    """Examples as rows of tensors, and the weight of their loss.

    input_ids, targets: [B, T] int64.
    attention_mask: [B, T] int64, or None where causality alone hides the padding (right padding: no real token can see
        what comes after it).
    weight: supervised tokens, the denominator of the loss.
    lengths: real input tokens of each example.
    documents: of one packed row, [1, T], the tokens of each example in it, end to end and without padding
        (`pack`); none of them sees another. Empty where every example is a row of its own.
    pixels: of each example what the model's forward takes of its pictures; empty where none has any.
    seen: [B, T] int32, 1 where a feature of a picture stands; None where there are no pixels.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor | None
    weight: int
    lengths: tuple[int, ...]
    examples: tuple[RecordName, ...]
    documents: tuple[int, ...] = ()
    pixels: tuple[Pixels, ...] = ()
    seen: torch.Tensor | None = None

    @property
    def rows(self) -> Batch:
        return self

    @property
    def tokens(self) -> int:
        """Real input tokens of all examples."""
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        """Documents of a packed row, rows elsewhere; a blank batch has them, too."""
        return len(self.documents) or len(self.input_ids)

    def to(self, device: torch.device) -> Batch:
        return self if self.input_ids.device == device else replace(self, **_moved_fields(self, device))

    def blank(self) -> Batch:
        return replace(self, weight=0, lengths=(), examples=())


@dataclass(frozen=True)
class OfRows:
    """What all batches share whose sequences are a `Batch` beside numbers of their own."""

    rows: Batch

    @property
    def tokens(self) -> int:
        return self.rows.tokens

    @property
    def examples(self) -> tuple[RecordName, ...]:
        return self.rows.examples

    def to(self, device: torch.device) -> Self:
        return replace(self, **_moved_fields(self, device))

    def blank(self) -> Self:
        return replace(self, rows=self.rows.blank(), weight=0)


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Python numbers as a tensor [N] on a device. `torch.tensor(numbers, device=device)` would have the host wait there
    until a GPU has computed all that it was given before."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def _moved_fields(batch: Batch | OfRows, device: torch.device) -> dict[str, Any]:
    return {one.name: _moved(getattr(batch, one.name), device) for one in fields(batch)}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Batch | OfRows):
        return value.to(device)
    return tuple(_moved(one, device) for one in value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class PairBatch(OfRows):
    """P pairs of a better and a worse answer to one prompt.

    rows: 2P rows padded on the right, or documents of one packed row, the P better answers first, then the P worse ones
        in the same order; its targets are the answers' tokens.
    common: for each pair, how many tokens both rows begin with (prompt and what the answers share); both rows may be
        the same in all.
    weight: pairs.
    answer_share: pairs of the whole step / tokens of its better answers, by which a sum over the latter's tokens
        becomes a mean over them where it stands beside a sum over pairs.
    reference: log-probabilities of the 2P answers under the reference policy, [2P] fp32, where they are known already.
    """

    common: tuple[int, ...]
    weight: int
    answer_share: float = 0.0
    reference: torch.Tensor | None = None

    @property
    def examples(self) -> tuple[RecordName, ...]:
        """Each pair once."""
        return self.rows.examples[: len(self.common)]


@dataclass(frozen=True)
class JudgedBatch(OfRows):
    """B answers, each judged good or bad (KTO).

    rows: B rows padded on the right, or documents of one packed row; targets are the answers' tokens.
    good: [B] bool.
    others: the same prompts, laid out the same way, each with the answer of another example of the step, from which the
        KL term is estimated; None where the loss needs none.
    kl: that estimate for the whole step, at least 0; None until it was made.
    reference: as in PairBatch, [B].
    weight: answers.
    good_share, bad_share: answers of the whole step / the good, the bad ones of it, by which a sum over those becomes a
        mean over them; 0 where the step has none.
    """

    good: torch.Tensor
    others: Batch | None
    weight: int
    kl: float | None = None
    reference: torch.Tensor | None = None
    good_share: float = 0.0
    bad_share: float = 0.0


@dataclass(frozen=True)
class PromptBatch(OfRows):
    """What a policy is to answer.

    rows: B prompts padded on the right, without targets.
    prompts: the ids of each.
    weight: prompts.
    """

    prompts: tuple[tuple[int, ...], ...]
    weight: int


def collate(examples: Sequence[Example], pad_id: int, side: Literal["left", "right"] = "right") -> Batch:
    """Pad to the longest example. Left padding needs, and gets, an attention mask."""
    longest = max(len(example.ids) for example in examples)
    input_ids = np.full((len(examples), longest), pad_id, dtype=np.int64)
    targets = np.full((len(examples), longest), IGNORE, dtype=np.int64)
    mask = np.zeros((len(examples), longest), dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.ids)
        start = longest - length if side == "left" else 0
        input_ids[row, start : start + length] = example.ids
        mask[row, start : start + length] = 1
        targets[row, start : start + length] = next_tokens(example)
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(targets),
        torch.from_numpy(mask) if side == "left" else None,
        int((targets != IGNORE).sum()),
        tuple(len(example.ids) for example in examples),
        tuple(example.number for example in examples),
    )


def pack(examples: Sequence[Example]) -> Batch:
    """One row of all examples in their order."""
    ids = np.concatenate([example.ids for example in examples]).astype(np.int64)
    targets = np.concatenate([next_tokens(example) for example in examples]).astype(np.int64)
    lengths = tuple(len(example.ids) for example in examples)
    return Batch(
        torch.from_numpy(ids)[None],
        torch.from_numpy(targets)[None],
        None,
        int((targets != IGNORE).sum()),
        lengths,
        tuple(example.number for example in examples),
        documents=lengths,
    )


def next_tokens(example: Example) -> np.ndarray:
    """[T]: what each position must predict, or IGNORE. The last position predicts nothing, and the first token has no
    predecessor to predict it, so its supervision flag cannot count."""
    return np.append(np.where(example.supervised[1:], example.ids[1:], IGNORE), IGNORE)


def unpacked(batch: Batch, pad_id: int) -> Batch:
    """The same examples, each in a padded row of its own; a batch that is not packed as it is."""
    if not batch.documents:
        return batch
    rows = zip(batch.input_ids[0].split(batch.documents), batch.targets[0].split(batch.documents), strict=True)
    longest, count = max(batch.documents), len(batch.documents)
    ids = batch.input_ids.new_full((count, longest), pad_id)
    targets = batch.targets.new_full((count, longest), IGNORE)
    for row, (own, wanted) in enumerate(rows):
        ids[row, : len(own)], targets[row, : len(own)] = own, wanted
    return Batch(ids, targets, None, batch.weight, batch.lengths, batch.examples)


def in_rows(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What a batch's tokens have, [B, T], with every example in a row of its own: of a packed row [D, L], D documents
    of at most L tokens, and 0 behind a document's end. Padded rows stay as they are."""
    if not batch.documents:
        return values
    return pad_sequence(list(values[0].split(batch.documents)), batch_first=True)


def documents_at(batch: Batch, places: Sequence[int]) -> Batch:
    """Of a packed row these documents, in this order, as a packed row of their own."""
    ids, targets = (
        torch.cat([row[0].split(batch.documents)[place] for place in places])[None]
        for row in (batch.input_ids, batch.targets)
    )
    documents = tuple(batch.documents[place] for place in places)
    part = replace(batch, input_ids=ids, targets=targets, documents=documents)
    if not batch.lengths:  # a blank one
        return part
    examples = tuple(batch.examples[place] for place in places)
    return replace(part, weight=int((targets != IGNORE).sum()), lengths=documents, examples=examples)


def position_ids(documents: Sequence[int], device: torch.device) -> torch.Tensor:
    """[1, T]: places from 0 in each document."""
    return torch.cat([torch.arange(length, device=device) for length in documents])[None]
