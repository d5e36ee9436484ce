"""A tokenised data set: the examples of one file or several, each a few arrays, and a choice among them.

The arrays are usually memory-mapped and never copied together: an example costs microseconds and no copy until it is
asked for. Files, row numbers and lines are kept, so that a log or an error can name the record it means.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from surefoot.data.batch import Example, RecordName

# `flags`
TRUNCATED, PROMPT_LOST, STOP_LOST, CONTROL_TEXT, CONTINUES, CONTINUED, GOOD, PROMPT_CUT = (1 << bit for bit in range(8))
CHUNK = 4096  # examples looked at together where all are looked at


@dataclass(frozen=True)
class TokenisedFile:
    """M examples that lie one after the other.

    name: the file's, for messages. ids[tokens] (uint16 or uint32), mask[tokens] (bool), offsets[M + 1], rows[M, 4]:
    number, line, flags and lost answers of each example. What `surefoot.data.columns` makes of these: supervised[M],
    prints[M] (V16).
    """

    name: str
    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    supervised: np.ndarray
    prints: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def let_go(self) -> None:
        """Of pages that were read of the ids and the mask; the system still has them, and so they cost no memory."""
        for array in (self.ids, self.mask):
            if isinstance(mapped := getattr(array.base, "_mmap", None), mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Chunk:
    """C examples end to end. start: the first one's index. lengths[C]; ids[tokens] as files hold them; mask[tokens]."""

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
    """N examples chosen among those of all files. chosen[N]: their places, the files laid one after the other."""

    files: tuple[TokenisedFile, ...]
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        file, place, part = self._find(index)
        return Example(file.ids[part].astype(np.int64), np.array(file.mask[part]), self._name(file, place))

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
            for file in self.files:
                file.let_go()

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
        """A file and the tokens of `count` examples of it that lie one after the other. first: as in `chosen`."""
        file, place = self.files[number], first - int(self._starts[number])
        return file, slice(int(file.offsets[place]), int(file.offsets[place + count]))

    def _name(self, file: TokenisedFile, place: int) -> RecordName:
        """What logs and errors call an example: the record's number, with its file where there are several."""
        if len(self.files) == 1:
            return int(file.rows[place, 0])
        return f"{file.name}:{file.rows[place, 1]}"


def of_files(files: Iterable[TokenisedFile]) -> TokenisedDataset:
    """All examples of these files."""
    files = tuple(files)
    return TokenisedDataset(files, np.arange(sum(map(len, files))))


def joined(datasets: Sequence[TokenisedDataset]) -> TokenisedDataset:
    """The examples of these data sets one after the other, over the same arrays."""
    starts = np.cumsum([0, *(sum(map(len, one.files)) for one in datasets)])
    chosen = [one.chosen + start for one, start in zip(datasets, starts, strict=False)]
    return TokenisedDataset(tuple(file for one in datasets for file in one.files), np.concatenate(chosen))
