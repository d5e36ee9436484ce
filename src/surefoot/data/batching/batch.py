"""Batches: the tensors of one forward pass, and their loss weight.

Each stage has its own type of batch; the training step uses only the protocol `Weighted`.

Shapes: B examples, T tokens of the longest one. Targets are already shifted: `targets[b, t]` is the token that
position t must predict, or IGNORE. Padding is masked by position, never by token id, so PAD may equal EOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from surefoot.data.formats.conversation import Picture

IGNORE = -100
Pixels = tuple[tuple[str, torch.Tensor], ...]  # (argument of the model's forward, tensor) of an example's pictures
RecordName = int | str  # a record's number in its file or, if there are several files, "data/a.json:120"


@dataclass(frozen=True)
class Example:
    """One tokenized example.

    ids: [T] int64.
    supervised: [T] bool, True where the token itself is learned.
    number: the record's name in logs and errors.
    """

    ids: np.ndarray
    supervised: np.ndarray
    number: RecordName
    pictures: tuple[Picture, ...] = ()


class Weighted(Protocol):
    """The interface of all batches, as used by the training step.

    rows: the sequences that go through the decoder.
    weight: contribution to the step's denominator (supervised tokens, pairs, answers, response tokens).
    tokens: input tokens without padding.
    examples: names of the records.
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
        """Return the same tensors with weight 0 and no tokens or names. A rank without a batch of its own runs it,
        because the other ranks wait for it in the collectives of the forward pass. Its loss is multiplied by 0."""
        ...


@dataclass(frozen=True)
class Batch:
    """Examples as rows of tensors, and the weight of their loss.

    input_ids, targets: [B, T] int64.
    attention_mask: [B, T] int64, or None if the padding is on the right, where causal attention hides it.
    weight: supervised tokens, the denominator of the loss.
    lengths: input tokens of each example, without padding.
    documents: for a packed row, [1, T]: the number of tokens of each example in it. The examples are concatenated
        without padding (`pack`) and do not attend to each other. Empty if every example has its own row.
    pictures: reads the pictures when it is called first; None if no example has any.
    seen: [B, T] int32, 1 at the positions of picture features; None if there are no pictures.
    digests: of the examples, in hexadecimal, where `digested` has added them or there are pictures, whose files the
        tensors do not name; empty otherwise.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor | None
    weight: int
    lengths: tuple[int, ...]
    examples: tuple[RecordName, ...]
    documents: tuple[int, ...] = ()
    pictures: Callable[[], tuple[Pixels, ...]] | None = None
    seen: torch.Tensor | None = None
    digests: tuple[str, ...] = ()

    @property
    def rows(self) -> Batch:
        return self

    @property
    def pixels(self) -> tuple[Pixels, ...]:
        """Per example, the tensors of its pictures for the model's forward; empty if no example has pictures."""
        return self.pictures() if self.pictures else ()

    @property
    def tokens(self) -> int:
        """Input tokens of all examples, without padding."""
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        """Number of documents of a packed row, else of rows; also in a blank batch."""
        return len(self.documents) or len(self.input_ids)

    def to(self, device: torch.device) -> Batch:
        if self.input_ids.device == device:
            return self
        return replace(self, **_moved_fields(self, device) | {"pictures": as_read(_moved(self.pixels, device))})

    def blank(self) -> Batch:
        return replace(self, weight=0, lengths=(), examples=())


def as_read(pixels: tuple[Pixels, ...]) -> Callable[[], tuple[Pixels, ...]] | None:
    """Return `Batch.pictures` for pictures that have been read."""
    return (lambda: pixels) if pixels else None


@dataclass(frozen=True)
class RowsBatch:
    """Base class of batches that consist of a `Batch` and additional tensors."""

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
    """Copy Python numbers to a device without blocking: [N]. `torch.tensor(numbers, device=device)` would make the host
    wait until the GPU has finished all earlier work."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def _moved_fields(batch: Batch | RowsBatch, device: torch.device) -> dict[str, Any]:
    return {one.name: _moved(getattr(batch, one.name), device) for one in fields(batch)}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Batch | RowsBatch):
        return value.to(device)
    return tuple(_moved(one, device) for one in value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class PairBatch(RowsBatch):
    """P pairs of a better and a worse answer to the same prompt.

    rows: 2P rows padded on the right, or 2P documents of one packed row: first the P better answers, then the P worse
        ones in the same order. Targets are the answers' tokens.
    common: number of leading tokens that the two rows of each pair share (the prompt and the common start of the
        answers).
    weight: number of pairs.
    answer_share: pairs of the whole step / tokens of its better answers; a sum over these tokens times it becomes a
        mean over tokens when it is added to a sum over pairs.
    reference: [2P] fp32, log-probabilities of the answers under the reference policy, if already known.
    row_share: as answer_share, for all tokens of the better rows but the first.
    """

    common: tuple[int, ...]
    weight: int
    answer_share: float = 0.0
    reference: torch.Tensor | None = None
    row_share: float = 0.0

    @property
    def examples(self) -> tuple[RecordName, ...]:
        """Name of each pair."""
        return self.rows.examples[: len(self.common)]


@dataclass(frozen=True)
class JudgedBatch(RowsBatch):
    """B answers, each judged good or bad (KTO).

    rows: B rows padded on the right, or documents of one packed row; targets are the answers' tokens.
    good: [B] bool.
    others: the same prompts in the same layout, each with the answer of another example of the step, for the estimate
        of the KL term; None if the loss needs none.
    kl: KL estimate of the whole step, at least 0; None until it is computed.
    reference: [B], as in PairBatch.
    weight: number of answers.
    good_share, bad_share: answers of the whole step / its good (bad) answers; a sum over these times it becomes a mean
        over them. 0 if the step has none.
    """

    good: torch.Tensor
    others: Batch | None
    weight: int
    kl: float | None = None
    reference: torch.Tensor | None = None
    good_share: float = 0.0
    bad_share: float = 0.0


@dataclass(frozen=True)
class DrawnBatch(RowsBatch):
    """B answers that the model in training has drawn itself.

    rows: prompts with their answers; targets are the answers' tokens.
    weight: number of these.
    """

    weight: int


@dataclass(frozen=True)
class PromptBatch(RowsBatch):
    """B prompts for a policy to answer.

    rows: the prompts, padded on the right, without targets.
    prompts: token ids of each.
    weight: number of prompts.
    """

    prompts: tuple[tuple[int, ...], ...]
    weight: int


def collate(examples: Sequence[Example], pad_id: int, side: Literal["left", "right"] = "right") -> Batch:
    """Pad examples to the longest one. Left padding adds an attention mask."""
    longest = max(len(example.ids) for example in examples)
    # int64: torch's embedding and cross entropy take no uint16, as which ids are stored.
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
    """Concatenate all examples into one packed row."""
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
    """Return the target of each position, or IGNORE: [T]. The last position has no target, and the supervision flag of
    the first token is ignored, because no position predicts it."""
    return np.append(np.where(example.supervised[1:], example.ids[1:], IGNORE), IGNORE)


def unpacked(batch: Batch, pad_id: int) -> Batch:
    """Convert a packed row into padded rows, one per example. Other batches are returned unchanged."""
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
    """Rearrange per-token values, [B, T], so that every example has its own row: a packed row becomes [D, L], D
    documents of at most L tokens, padded with 0. Padded rows are returned unchanged."""
    if not batch.documents:
        return values
    return pad_sequence(list(values[0].split(batch.documents)), batch_first=True)


def documents_at(batch: Batch, places: Sequence[int]) -> Batch:
    """Select documents of a packed row, in this order, as a new packed row."""
    ids, targets = (
        torch.cat([row[0].split(batch.documents)[place] for place in places])[None]
        for row in (batch.input_ids, batch.targets)
    )
    documents = tuple(batch.documents[place] for place in places)
    part = replace(batch, input_ids=ids, targets=targets, documents=documents, digests=())
    if not batch.lengths:  # a blank batch
        return part
    examples = tuple(batch.examples[place] for place in places)
    return replace(part, weight=int((targets != IGNORE).sum()), lengths=documents, examples=examples)


def position_ids(documents: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return position ids that restart at 0 in each document: [1, T]."""
    # Made on the host: a GPU would start a kernel for each document.
    return torch.cat([torch.arange(length) for length in documents])[None].to(device, non_blocking=True)


DIGEST_SIZE = 16  # bytes


def example_digest(example: Example) -> bytes:
    """Return the digest of an example's ids, of which of them are learned, and of its pictures, by which what is stored
    about it is found whatever the step, order or batch. `row_digests` gives the same in a batch."""
    return _digest(example.ids.astype(np.int64), next_tokens(example).astype(np.int64), example.pictures)


def row_digests(rows: Batch) -> list[bytes]:
    """Return the digest of each example, of packed or padded rows. The host waits for rows on a GPU; see `digested`."""
    if rows.digests:
        return [bytes.fromhex(one) for one in rows.digests]
    ids, targets = (in_rows(one, rows).cpu().numpy() for one in (rows.input_ids, rows.targets))
    return [_digest(ids[row, :length], targets[row, :length]) for row, length in enumerate(rows.lengths)]


def digested(batch: Weighted) -> Weighted:
    """Return the batch with the digests of its rows, which they keep on another device."""
    rows = replace(batch.rows, digests=tuple(one.hex() for one in row_digests(batch.rows)))
    if isinstance(batch, Batch):
        return rows
    assert isinstance(batch, RowsBatch)
    return replace(batch, rows=rows)


def _digest(ids: np.ndarray, targets: np.ndarray, pictures: Sequence[Picture] = ()) -> bytes:
    seen = "".join(picture.sha256 for picture in pictures).encode()
    return hashlib.blake2b(ids.tobytes() + targets.tobytes() + seen, digest_size=DIGEST_SIZE).digest()
