"""What a teacher on a server said, stored in the run folder, so that it is asked once about each example and a resumed
run computes with the same bits.

`teacher-RANK.jsonl` begins with the server's model and version. Each further line has the digest of an example, and the
likeliest tokens at its learned positions as base64 of int32 tokens [n, K], fp32 log-probabilities [n, K] and the fp32
rest [n] (`surefoot.kernels.divergence.Likeliest`). Answers that the student has drawn have the step too: a run that
continues later drops them. Every rank writes a file of its own and reads those of all.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from surefoot.kernels.divergence import Likeliest
from surefoot.report import journal
from surefoot.system import durable

_NAME = "teacher-{}.jsonl"


@dataclass(frozen=True)
class _Place:
    """Where a line stands: bytes of a file from begin to end."""

    path: Path
    begin: int
    end: int


class TeacherRecord:
    """The record of a run.

    folder: the run's.
    rank: this process's.
    step: where the run begins or continues.
    server: name and version of the model on the server, now.
    before: what the record began with; None for a new one.
    """

    def __init__(self, folder: Path, rank: int, step: int, server: dict[str, str]):
        self._path = folder / _NAME.format(rank)
        self._places: dict[str, _Place] = {}
        self.server, self.before = server, None
        if self._path.exists():
            _drop_old(self._path, step)
        for path in sorted(folder.glob(_NAME.format("*"))):
            for begin, end, line in journal.lines(path):
                if "key" in line:
                    self._places[line["key"]] = _Place(path, begin, end)
                elif path == self._path:
                    self.before = line
        if self.before is None:
            journal.append(self._path, server)

    def __contains__(self, digest: bytes) -> bool:
        return digest.hex() in self._places

    def keep(self, digest: bytes, step: int | None, known: Likeliest) -> None:
        """step: of an answer that the student has drawn; None for one of the data."""
        parts = (known.tokens.int(), known.logprobs.float(), known.rest.float())
        values = b"".join(part.numpy().tobytes() for part in parts)
        line: dict[str, Any] = {"key": digest.hex()} | ({} if step is None else {"step": step})
        line |= {"tokens": len(known.rest), "values": base64.b64encode(values).decode()}
        begin = self._path.stat().st_size
        journal.append(self._path, line)
        self._places[digest.hex()] = _Place(self._path, begin, self._path.stat().st_size)

    def find(self, digest: bytes) -> Likeliest:
        """Return what is stored of an example that is here."""
        place = self._places[digest.hex()]
        with place.path.open("rb") as file:
            line = journal.parse(_part(file, place.begin, place.end).decode())
        assert line is not None
        values, count = base64.b64decode(line["values"]), line["tokens"]
        numbers = torch.from_numpy(np.frombuffer(values, dtype=np.float32).copy())
        size = (len(numbers) - count) // 2
        tokens = numbers[:size].view(torch.int32)
        return Likeliest(tokens.reshape(count, -1), numbers[size : 2 * size].reshape(count, -1), numbers[2 * size :])


def _drop_old(path: Path, step: int) -> None:
    """Remove lines of earlier steps, and one that a power failure has cut, if there are any."""
    kept = [(begin, end) for begin, end, line in journal.lines(path) if line.get("step", step) >= step]
    if sum(end - begin for begin, end in kept) < path.stat().st_size:
        with path.open("rb") as file:
            durable.write_parts(path, (_part(file, *one) for one in kept))


def _part(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
