"""Stored distributions of a teacher: what `surefoot teach` writes, and a run reads in the place of a model.

A folder has `teacher.json` and safetensors files. For each learned token of each example, in order: the K likeliest
tokens of the teacher there, their log-probabilities at the temperature, and the logarithm of the probability of all
others ("the rest"), which is computed from all logits, not as 1 minus the others. An example is found by its digest, so
nothing can pair a position with another's distribution: with another template, tokenizer, length or record there is
none, and the run is refused before step 1.

Bytes per learned token: 8 K + 4.

Shapes: E examples of a file, N learned tokens of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from surefoot.data.batching.batch import DIGEST_SIZE, Batch, Example, example_digest, in_rows, row_digests
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.families.files import read_json
from surefoot.kernels.divergence import Known, Likeliest
from surefoot.methods.losses.distill import Teacher, stand_in
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError

META = "teacher.json"
_CODE = "SF-TEACHER"
_SHARD = 256 << 20  # bytes of a file


@dataclass(frozen=True)
class StoredFacts:
    """What `teacher.json` says.

    teacher: as the config of `surefoot teach` named it.
    top: K. temperature: of the log-probabilities.
    words: number of token ids, from 0, that they are among.
    tokenizer: SHA-256 of the student's tokenizer files.
    examples, tokens: how many are stored.
    files: name -> SHA-256.
    """

    teacher: str
    top: int
    temperature: float
    words: int
    tokenizer: str
    examples: int
    tokens: int
    files: dict[str, str] = field(default_factory=dict)


def is_stored(path: str) -> bool:
    """Whether a path is a folder of `surefoot teach`."""
    return (Path(path) / META).is_file()


def read_facts(path: str, key: str) -> StoredFacts:
    """Raise InputError where the file is not what `surefoot teach` writes. key: of the config, for the fault."""
    try:
        return StoredFacts(**read_json(Path(path) / META))
    except TypeError:
        what = f"{Path(path) / META} is not what this version of `surefoot teach` writes"
        raise InputError(Fault(key, what, "run it again", code=_CODE)) from None


class Writer:
    """Collects what a teacher says of batches, and writes it into `folder`, a file for each 256 MiB."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._kept: list[tuple[bytes, Likeliest]] = []
        self._bytes = 0
        self._seen: set[bytes] = set()
        self.files: dict[str, str] = {}
        self.examples = self.tokens = 0

    def add(self, rows: Batch, known: Likeliest) -> None:
        """known: at the supervised positions of the rows, in order. An example that is there already is left out."""
        counts = [int(number) for number in in_rows(rows.targets >= 0, rows).sum(dim=1)]
        parts = zip(*(one.cpu().split(counts) for one in (known.tokens, known.logprobs, known.rest)), strict=True)
        for digest, part in zip(row_digests(rows), parts, strict=True):
            if digest in self._seen:
                continue
            self._seen.add(digest)
            self._kept.append((digest, Likeliest(*part)))
            self.examples += 1
            self.tokens += len(part[0])
            self._bytes += 8 * part[0].numel()
        if self._bytes >= _SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        if not self._kept:
            return
        lengths = [len(one.rest) for _, one in self._kept]
        name = f"distributions-{len(self.files) + 1:05}.safetensors"
        tensors = {
            "digests": torch.frombuffer(bytearray(b"".join(digest for digest, _ in self._kept)), dtype=torch.uint8),
            "ends": torch.tensor(lengths).cumsum(0),
            "tokens": torch.cat([one.tokens for _, one in self._kept]).int(),
            "logprobs": torch.cat([one.logprobs for _, one in self._kept]).float(),
            "rest": torch.cat([one.rest for _, one in self._kept]).float(),
        }
        save_file(tensors, self._folder / name)
        self.files[name] = durable.sha256_file(self._folder / name)
        self._kept, self._bytes = [], 0


def write_facts(folder: Path, facts: StoredFacts) -> None:
    (folder / META).write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Place:
    """Where an example's tokens stand: in one of the files, from begin to end."""

    file: Any
    begin: int
    end: int


def _places(folder: Path, facts: StoredFacts) -> dict[bytes, _Place]:
    found: dict[bytes, _Place] = {}
    for name in facts.files:
        file = safe_open(folder / name, framework="pt")
        of_all, ends = file.get_tensor("digests").numpy().tobytes(), file.get_tensor("ends").tolist()
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            found[of_all[number * DIGEST_SIZE : (number + 1) * DIGEST_SIZE]] = _Place(file, begin, end)
    return found


def check_stored(
    path: str, key: str, *, tokenizer: str, temperature: float, words: int, data: Sequence[TokenizedDataset]
) -> None:
    """Raise InputError for a folder that is damaged, or was made for another tokenizer, temperature or other data.

    key: of the config, for faults.
    tokenizer: SHA-256 of the run's tokenizer files.
    words: token ids of the student.
    data: all examples that the run will ask about.
    """
    facts, folder = read_facts(path, key), Path(path)
    _check(facts, path, key, tokenizer, temperature, words)
    for name, digest in facts.files.items():
        if not (folder / name).is_file() or durable.sha256_file(folder / name) != digest:
            what = f"{folder / name} is missing or not what was written"
            raise InputError(Fault(key, what, "run `surefoot teach` again", code=_CODE))
    places = _places(folder, facts)
    missing, total = 0, 0
    for example in _examples(data):
        total += 1
        missing += example_digest(example) not in places
    if missing:
        what = (
            f"{path} has nothing on {missing:,} of {total:,} examples: it is of other data, or of another template or "
        )
        what += "data.max_length"
        raise InputError(Fault(key, what, "run `surefoot teach` with this config", code=_CODE))


def open_stored(path: str, key: str) -> Teacher:
    """Return the teacher that reads a folder, which `check_stored` has passed."""
    facts = read_facts(path, key)
    places = _places(Path(path), facts)

    def teacher(rows: Batch, learned: torch.Tensor) -> Known:
        if not rows.lengths:  # a blank batch, of no weight
            return stand_in(rows, learned)
        found, device = [places[digest] for digest in row_digests(rows)], rows.input_ids.device
        tokens, logprobs, rest = (
            _sent(torch.cat([one.file.get_slice(name)[one.begin : one.end] for one in found]), device)
            for name in ("tokens", "logprobs", "rest")
        )
        return Likeliest(tokens.long(), logprobs, rest, facts.words)

    return teacher


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device. From pageable memory, large copies wait for their turn in a staging area."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _examples(data: Sequence[TokenizedDataset]) -> Iterator[Example]:
    for dataset in data:
        yield from (dataset[index] for index in range(len(dataset)))


def _check(facts: StoredFacts, path: str, key: str, tokenizer: str, temperature: float, words: int) -> None:
    fix = "run `surefoot teach` with this config"
    if facts.tokenizer != tokenizer:
        what = f"{path} was made with another tokenizer than this run's"
        raise InputError(Fault(key, what, fix, code="SF-TOKENIZER"))
    if facts.temperature != temperature:
        what = f"{path} was made at a temperature of {facts.temperature:g}, and distill.temperature is {temperature:g}"
        raise InputError(Fault(key, what, f"set {facts.temperature:g}, or {fix}", code=_CODE))
    if facts.words > words:
        what = f"{path} has {facts.words:,} token ids, and the student {words:,}"
        raise InputError(Fault(key, what, fix, code="SF-TOKENIZER"))
