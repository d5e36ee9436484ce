"""A tokenised data set: the examples of one file or several, each a few arrays, and a selection of them.

The arrays are usually memory-mapped and never concatenated: an example costs microseconds and no copy until it is
read. Files, record numbers and lines are kept, so that a log or an error can name the record. What a start needs of
every example (label counts, hashes for finding duplicates) is computed once and stored beside the tokens.
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
from surefoot.data.tokenize.sight import Sight

# `flags`
TRUNCATED, PROMPT_LOST, STOP_LOST, CONTROL_TEXT, CONTINUES, CONTINUED, GOOD, PROMPT_CUT = (1 << bit for bit in range(8))
CHUNK = 4096  # examples looked at together where all are looked at


@dataclass(frozen=True)
class TokenisedFile:
    """M examples that lie one after the other.

    name: the file's, for messages.
    ids: [tokens] uint16 or uint32.
    mask: [tokens] bool, True where the token is learned.
    offsets: [M + 1] int64, where each example begins, and the end.
    rows: [M, 4] int64: number, line, flags and lost answers of each example.
    supervised: [M] int64, computed from mask.
    prints: [M] V16, hashes of ids, mask and pictures.
    pictures: of the examples that have some, by their place.
    fields: [bytes] uint8, the records of prompts as JSON, one after the other; empty where records are no prompts.
    field_offsets: [M + 1] int64, where each begins, and the end; [1] where there are none.
    """

    name: str
    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    supervised: np.ndarray
    prints: np.ndarray
    pictures: Mapping[int, tuple[Picture, ...]] = field(default_factory=dict)
    fields: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    field_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def all_pictures(self) -> Iterator[Picture]:
        """Of all examples, one after the other."""
        return itertools.chain.from_iterable(self.pictures.values())

    def release_pages(self) -> None:
        """Of pages that were read of the ids and the mask; the system still has them, and so they cost no memory."""
        for array in (self.ids, self.mask):
            if isinstance(mapped := getattr(array.base, "_mmap", None), mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Chunk:
    """C examples end to end.

    start: the first one's index.
    lengths: [C] int64.
    ids, mask: [tokens], as files hold them.
    """

    start: int
    lengths: np.ndarray
    ids: np.ndarray
    mask: np.ndarray

    @cached_property
    def ends(self) -> np.ndarray:
        """Of each example the place behind its last token: [C] int64."""
        return np.cumsum(self.lengths)


@dataclass(frozen=True)
class TokenisedDataset:
    """N examples chosen among those of all files.

    chosen[N]: their places, the files laid one after the other.
    sight: makes the pixels of pictures; None where no example has any.
    """

    files: tuple[TokenisedFile, ...]
    chosen: np.ndarray
    sight: Sight | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        file, place, part = self._find(index)
        pictures = file.pictures.get(place, ())
        return Example(file.ids[part].astype(np.int64), np.array(file.mask[part]), self._name(file, place), pictures)

    def pictures(self) -> Iterator[tuple[int, tuple[Picture, ...]]]:
        """The examples that have some, by number, with these."""
        if any(file.pictures for file in self.files):
            for index in range(len(self)):
                file, place, _ = self._find(index)
                if own := file.pictures.get(place):
                    yield index, own

    def record(self, index: int) -> Mapping[str, Any]:
        """Of a prompt: all fields of the record that it was read from."""
        file, place, _ = self._find(index)
        return json.loads(file.fields[file.field_offsets[place] : file.field_offsets[place + 1]].tobytes())

    def records_digest(self) -> str:
        """SHA-256 of the records of all prompts, in the order of the files."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.fields.tobytes())
        return digest.hexdigest()

    def name(self, index: int) -> RecordName:
        """What logs and errors call one example."""
        file, place, _ = self._find(index)
        return self._name(file, place)

    def length(self, index: int) -> int:
        """Tokens of one example."""
        return int(self.lengths[index])

    def supervised(self, index: int) -> int:
        """Tokens of one example that carry loss."""
        return int(self.supervised_counts[index])

    @cached_property
    def supervised_counts(self) -> np.ndarray:
        """Tokens of every example that carry loss: [N] int64."""
        return np.concatenate([file.supervised for file in self.files])[self.chosen]

    def chunks(self) -> Iterator[Chunk]:
        """All examples in their order, many at a time: what looks at every token does so much faster than one by one.
        Neighbours in a file are read together."""
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
            # Else the whole data set would count as memory of this process once it was looked through.
            for file in self.files:
                file.release_pages()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every example: [N] int64."""
        return np.concatenate([np.diff(file.offsets) for file in self.files])[self.chosen]

    def fingerprints(self) -> np.ndarray:
        """Of every example: equal for two with the same ids and the same mask, also of different data sets of one
        tokenizer: [N] V16."""
        return np.concatenate([file.prints for file in self.files])[self.chosen]

    def row(self, index: int) -> tuple[str, int, int]:
        """File, number of the record in it and line where it starts, both from 1."""
        file, place, _ = self._find(index)
        return file.name, int(file.rows[place, 0]), int(file.rows[place, 1])

    def flags(self) -> np.ndarray:
        """TRUNCATED, PROMPT_CUT, PROMPT_LOST, STOP_LOST, CONTROL_TEXT, CONTINUES, CONTINUED and GOOD of every example:
        [N]. CONTINUES and CONTINUED: of a text in several examples, all but the first and all but the last."""
        return np.concatenate([file.rows[:, 2] for file in self.files])[self.chosen]

    def good(self) -> np.ndarray:
        """Of every example whether it is the better of a pair or was judged good: [N] bool."""
        return self.flags() & GOOD > 0

    def answers_lost(self) -> int:
        """Answers of which cutting left nothing, in the examples that are left."""
        return int(np.concatenate([file.rows[:, 3] for file in self.files])[self.chosen].sum())

    def records(self) -> np.ndarray:
        """Which record each example comes from, counted from 0: [N] int64. Parts of one text share theirs."""
        places = [np.full(len(file), place) for place, file in enumerate(self.files)]
        numbers = [file.rows[:, 0] for file in self.files]
        names = np.stack([np.concatenate(places), np.concatenate(numbers)], axis=1)[self.chosen]
        return np.cumsum([False, *np.any(names[1:] != names[:-1], axis=1)])

    def subset(self, indices: Sequence[int] | np.ndarray) -> TokenisedDataset:
        """These examples, in this order, over the same arrays."""
        return replace(self, chosen=self.chosen[np.asarray(indices, dtype=np.int64)])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Place of each file's first example."""
        return np.cumsum([0, *(len(file) for file in self.files)])

    def _find(self, index: int) -> tuple[TokenisedFile, int, slice]:
        """The file of an example, its place in it and its tokens."""
        at = int(self.chosen[index])
        number = int(np.searchsorted(self._starts, at, side="right")) - 1
        file, place = self.files[number], at - int(self._starts[number])
        return file, place, slice(int(file.offsets[place]), int(file.offsets[place + 1]))

    def _run(self, number: int, first: int, count: int) -> tuple[TokenisedFile, slice]:
        """A file and the tokens of `count` examples of it that lie one after the other.

        first: as in `chosen`.
        """
        file, place = self.files[number], first - int(self._starts[number])
        return file, slice(int(file.offsets[place]), int(file.offsets[place + count]))

    def _name(self, file: TokenisedFile, place: int) -> RecordName:
        """What logs and errors call an example: the record's number, with its file where there are several."""
        if len(self.files) == 1:
            return int(file.rows[place, 0])
        return f"{file.name}:{file.rows[place, 1]}"


def of_files(files: Iterable[TokenisedFile], sight: Sight | None = None) -> TokenisedDataset:
    """All examples of these files."""
    files = tuple(files)
    return TokenisedDataset(files, np.arange(sum(map(len, files))), sight)


def joined(datasets: Sequence[TokenisedDataset]) -> TokenisedDataset:
    """The examples of these data sets one after the other, over the same arrays."""
    starts = np.cumsum([0, *(sum(map(len, one.files)) for one in datasets)])
    chosen = [one.chosen + start for one, start in zip(datasets, starts, strict=False)]
    files = tuple(file for one in datasets for file in one.files)
    return TokenisedDataset(files, np.concatenate(chosen), datasets[0].sight)


PRINT = np.dtype("V16")  # BLAKE2b of 16 bytes: two examples of ten million are the same by chance once in 10^25


def supervised_of(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Tokens of each example that carry loss: [M] int64."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return np.diff(before[offsets])


def prints_of(ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Of each example a hash of its ids, whatever their width, and of its labels: [M] V16."""
    found = bytearray()
    wide, labels = memoryview(ids.astype("<u4").tobytes()), memoryview(mask.tobytes())
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one = hashlib.blake2b(wide[4 * start : 4 * end], digest_size=PRINT.itemsize)
        one.update(labels[start:end])
        found += one.digest()
    return np.frombuffer(found, dtype=PRINT)


Place = tuple[str, int, int]  # file, number of the record and line where it starts, both from 1


@dataclass(frozen=True)
class SourceFacts:
    """What is known of a file and of how its records were read.

    sha256: of the file.
    content: hash of all that decides which conversations its records are.
    layout, template: as used.
    rows: records of the file.
    used: the first so many of them.
    dropped: records that have no label left.
    unused: fields that nothing reads.
    notes: what a reader should know of the template.
    placeholders: records whose texts hold an unfilled {{name}}.
    placeholder: the first of these.
    part: where examples of the file went elsewhere.
    commit: of the hub data set that the file belongs to.
    template_fault: why it is not the template that was planned.
    unkept: why it is tokenised anew at every start; empty where it is not.
    example_prompt: something that a user could ask the trained model, from the records; empty where none is short.
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


def together(facts: Sequence[SourceFacts], name: str | None = None) -> SourceFacts:
    """The facts of several files as one.

    name: of the whole; None: all their names.
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
