"""Tokenized data sets: memory-mapped arrays of one or more files, and a selection of their examples.

The arrays are never concatenated, so an example costs nothing until it is read. Files, record numbers and lines are
kept, so that logs and errors can name the record. Values that every start needs for all examples (label counts, hashes
for finding duplicates) are computed once and stored with the tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from surefoot.data.batching.batch import Example, RecordName
from surefoot.data.formats.conversation import Picture
from surefoot.data.tokenize.picture_processor import PictureProcessor

# `flags`
(TRUNCATED, PROMPT_LOST, STOP_LOST, CONTROL_TEXT, CONTINUES, CONTINUED, GOOD, PROMPT_CUT, GIVEN) = (
    1 << bit for bit in range(9)
)
CHUNK = 4096  # examples per chunk in passes over all examples


@dataclass(frozen=True)
class TokenizedFile:
    """The M examples of one file, concatenated.

    name: the file's name, for messages.
    ids: [tokens] uint16 or uint32.
    mask: [tokens] bool, True where the token is learned.
    offsets: [M + 1] int64, start of each example, and the end.
    rows: [M, 4] int64, record number, line, flags and number of lost answers of each example.
    supervised: [M] int64, learned tokens of each example.
    fingerprints: [M] V16, hashes of ids, mask and pictures.
    pictures: index of an example -> its pictures, for examples that have some.
    fields: [bytes] uint8, the records of prompts as concatenated JSON; empty for other kinds of data.
    field_offsets: [M + 1] int64, start of each record, and the end; [1] for other kinds of data.
    """

    name: str
    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    supervised: np.ndarray
    fingerprints: np.ndarray
    pictures: Mapping[int, tuple[Picture, ...]] = field(default_factory=dict)
    fields: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    field_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def all_pictures(self) -> Iterator[Picture]:
        """Iterate over the pictures of all examples."""
        return itertools.chain.from_iterable(self.pictures.values())

    def release_pages(self) -> None:
        """Release the mapped pages of ids and mask that were read. They stay in the page cache but no longer count as
        memory of this process."""
        for array in (self.ids, self.mask):
            if isinstance(mapped := getattr(array.base, "_mmap", None), mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Chunk:
    """C neighboring examples, concatenated.

    start: index of the first one in the data set.
    lengths: [C] int64, tokens of each.
    ids, mask: [tokens], as in `TokenizedFile`.
    """

    start: int
    lengths: np.ndarray
    ids: np.ndarray
    mask: np.ndarray

    @cached_property
    def ends(self) -> np.ndarray:
        """Position after the last token of each example: [C] int64."""
        return np.cumsum(self.lengths)


@dataclass(frozen=True)
class TokenizedDataset:
    """N examples selected from one or more files.

    chosen[N]: their indices into the concatenation of all files.
    processor: image processing that makes the pixels; None if no example has pictures.
    """

    files: tuple[TokenizedFile, ...]
    chosen: np.ndarray
    processor: PictureProcessor | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        file, place, part = self._find(index)
        pictures = file.pictures.get(place, ())
        return Example(file.ids[part].astype(np.int64), np.array(file.mask[part]), self._name(file, place), pictures)

    def pictures(self) -> Iterator[tuple[int, tuple[Picture, ...]]]:
        """Iterate over (index, pictures) of the examples that have pictures."""
        if any(file.pictures for file in self.files):
            for index in range(len(self)):
                file, place, _ = self._find(index)
                if own := file.pictures.get(place):
                    yield index, own

    def shown(self, index: int) -> tuple[Picture, ...]:
        """Return the pictures of an example."""
        file, place, _ = self._find(index)
        return file.pictures.get(place, ())

    def with_facts(self, index: int, text: str) -> str:
        """Name the pictures in the decoded tokens of an example, for display."""
        shown = self.shown(index)
        return self.processor.with_facts(text, iter(shown)) if shown and self.processor else text

    def picture_count(self, index: int) -> int:
        return len(self.shown(index))

    def record(self, index: int) -> Mapping[str, Any]:
        """Return all fields of the record of a prompt."""
        file, place, _ = self._find(index)
        return json.loads(file.fields[file.field_offsets[place] : file.field_offsets[place + 1]].tobytes())

    def records_digest(self) -> str:
        """Return the SHA-256 of the records of all prompts, in file order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.fields.tobytes())
        return digest.hexdigest()

    def name(self, index: int) -> RecordName:
        """Return the name of one example for logs and errors."""
        file, place, _ = self._find(index)
        return self._name(file, place)

    def length(self, index: int) -> int:
        """Return the number of tokens of one example."""
        return int(self.lengths[index])

    def supervised(self, index: int) -> int:
        """Return the number of learned tokens of one example."""
        return int(self.supervised_counts[index])

    @cached_property
    def supervised_counts(self) -> np.ndarray:
        """Learned tokens of each example: [N] int64."""
        return np.concatenate([file.supervised for file in self.files])[self.chosen]

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over all examples in order, CHUNK at a time, which is much faster than one by one. Neighbors in a
        file are read with one slice."""
        for start in range(0, len(self), CHUNK):
            chosen = self.chosen[start : start + CHUNK]
            number = np.searchsorted(self._starts, chosen, side="right") - 1
            apart = (np.diff(chosen) != 1) | (np.diff(number) != 0)
            begins = np.append(0, np.flatnonzero(apart) + 1)
            counts = np.diff(np.append(begins, len(chosen)))
            parts = [
                self._run(int(file), int(first), int(count))
                for file, first, count in zip(number[begins], chosen[begins], counts, strict=True)
            ]
            yield Chunk(
                start,
                self.lengths[start : start + CHUNK],
                np.concatenate([file.ids[part] for file, part in parts]),
                np.concatenate([file.mask[part] for file, part in parts]),
            )
            # Otherwise a full pass would make the whole data set count as memory of this process.
            for file in self.files:
                file.release_pages()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example: [N] int64."""
        return np.concatenate([np.diff(file.offsets) for file in self.files])[self.chosen]

    def fingerprints(self) -> np.ndarray:
        """Return a hash of ids, mask and pictures of each example: [N] V16. Comparable between data sets of the same
        tokenizer."""
        return np.concatenate([file.fingerprints for file in self.files])[self.chosen]

    def row(self, index: int) -> tuple[str, int, int]:
        """Return file, record number and first line of an example's record, both from 1."""
        file, place, _ = self._find(index)
        return file.name, int(file.rows[place, 0]), int(file.rows[place, 1])

    def flags(self) -> np.ndarray:
        """Return the flags (TRUNCATED, …) of each example: [N] int64. If a text was split into several examples,
        CONTINUES is set on all but the first and CONTINUED on all but the last."""
        return np.concatenate([file.rows[:, 2] for file in self.files])[self.chosen]

    @cached_property
    def good(self) -> np.ndarray:
        """Whether each example is the better of a pair or was judged good: [N] bool."""
        return self.flags() & GOOD > 0

    def answers_lost(self) -> int:
        """Return the number of answers that truncation removed completely from the remaining examples."""
        return int(np.concatenate([file.rows[:, 3] for file in self.files])[self.chosen].sum())

    def records(self) -> np.ndarray:
        """Return the record index (from 0) of each example: [N] int64. Parts of one text have the same."""
        places = [np.full(len(file), place) for place, file in enumerate(self.files)]
        numbers = [file.rows[:, 0] for file in self.files]
        names = np.stack([np.concatenate(places), np.concatenate(numbers)], axis=1)[self.chosen]
        return np.cumsum([False, *np.any(names[1:] != names[:-1], axis=1)])

    def subset(self, indices: Sequence[int] | np.ndarray) -> TokenizedDataset:
        """Select these examples, in this order, without copying their tokens."""
        return replace(self, chosen=self.chosen[np.asarray(indices, dtype=np.int64)])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Index of each file's first example in the concatenation."""
        return np.cumsum([0, *(len(file) for file in self.files)])

    def _find(self, index: int) -> tuple[TokenizedFile, int, slice]:
        """Return an example's file, its index in the file and the slice of its tokens."""
        at = int(self.chosen[index])
        number = int(np.searchsorted(self._starts, at, side="right")) - 1
        file, place = self.files[number], at - int(self._starts[number])
        return file, place, slice(int(file.offsets[place]), int(file.offsets[place + 1]))

    def _run(self, number: int, first: int, count: int) -> tuple[TokenizedFile, slice]:
        """Return the file and the token slice of `count` neighboring examples; `first` is an index as in `chosen`."""
        file, place = self.files[number], first - int(self._starts[number])
        return file, slice(int(file.offsets[place]), int(file.offsets[place + count]))

    def _name(self, file: TokenizedFile, place: int) -> RecordName:
        """Name an example by its record number, or by file and line if there are several files."""
        if len(self.files) == 1:
            return int(file.rows[place, 0])
        return f"{file.name}:{file.rows[place, 1]}"


def of_files(files: Iterable[TokenizedFile], processor: PictureProcessor | None = None) -> TokenizedDataset:
    """Return a data set of all examples of these files."""
    files = tuple(files)
    return TokenizedDataset(files, np.arange(sum(map(len, files))), processor)


def joined(datasets: Sequence[TokenizedDataset]) -> TokenizedDataset:
    """Concatenate data sets without copying their tokens."""
    starts = np.cumsum([0, *(sum(map(len, one.files)) for one in datasets)])
    chosen = [one.chosen + start for one, start in zip(datasets, starts, strict=False)]
    files = tuple(file for one in datasets for file in one.files)
    return TokenizedDataset(files, np.concatenate(chosen), datasets[0].processor)


FINGERPRINT = np.dtype("V16")  # BLAKE2b, 16 bytes: probability of a collision in ten million examples is about 10^-25


def supervised_of(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Count the learned tokens of each example: [M] int64."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return np.diff(before[offsets])


def fingerprints_of(ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Hash the ids (independent of their dtype) and labels of each example: [M] V16."""
    found = bytearray()
    # Always 32 bits, little-endian: the dtype of the ids depends on the vocabulary, but equal examples have equal
    # hashes.
    wide, labels = memoryview(ids.astype("<u4").tobytes()), memoryview(mask.tobytes())
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one = hashlib.blake2b(wide[4 * start : 4 * end], digest_size=FINGERPRINT.itemsize)
        one.update(labels[start:end])
        found += one.digest()
    return np.frombuffer(found, dtype=FINGERPRINT)


Place = tuple[str, int, int]  # file, record number and first line of the record, both from 1


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a file and how its records were read.

    sha256: hash of the file.
    content: hash of everything that decides which conversations its records become.
    layout, layout_reason: the record format in use, and how it was found.
    template: the template in use.
    rows: number of records in the file.
    used: number of records used, from the start of the file.
    dropped: records without a label left.
    unused: fields that are not read.
    notes: remarks on the template.
    placeholders: records whose texts contain an unfilled {{name}}.
    placeholder: the first such placeholder.
    part: which part of the file's examples is in use; empty for all.
    commit: commit of the hub data set that the file belongs to.
    template_fault: why the planned template was not used; empty if it was.
    unkept: why the tokenized data could not be cached; empty if it was.
    example_prompt: a short prompt from the records, to try the trained model with; empty if there is none.
    """

    file: str
    sha256: str
    content: str
    layout: str
    layout_reason: str
    template: str
    rows: int
    used: int
    dropped: tuple[Place, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    placeholders: tuple[Place, ...] = ()
    placeholder: str = ""
    part: str = ""
    commit: str | None = None
    template_fault: str = ""
    example_prompt: str = ""
    unkept: str = ""


def merge_facts(facts: Sequence[SourceFacts], name: str | None = None) -> SourceFacts:
    """Merge the facts of several files.

    name: name of the whole; None: all file names.
    """
    if len(facts) == 1:
        return facts[0]
    return SourceFacts(
        file=_listed(one.file for one in facts) if name is None else name,
        sha256=_hash(one.sha256 for one in facts),
        content=_hash(one.content for one in facts),
        layout=_listed(one.layout for one in facts),
        layout_reason=_listed(one.layout_reason for one in facts),
        template=_listed(one.template for one in facts),
        rows=sum(one.rows for one in facts),
        used=sum(one.used for one in facts),
        dropped=tuple(place for one in facts for place in one.dropped),
        unused=tuple(dict.fromkeys(field for one in facts for field in one.unused)),
        notes=tuple(dict.fromkeys(note for one in facts for note in one.notes)),
        placeholders=tuple(place for one in facts for place in one.placeholders),
        placeholder=next((one.placeholder for one in facts if one.placeholder), ""),
        part=_listed(one.part for one in facts if one.part),
        example_prompt=next((one.example_prompt for one in facts if one.example_prompt), ""),
        unkept=next((one.unkept for one in facts if one.unkept), ""),
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
