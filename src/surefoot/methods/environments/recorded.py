"""What environments answered, kept in the run folder so that a step which is repeated hears the same again.

`turns-RANK.jsonl` has a line for each answer: the step, a key and the reply. The key is a hash of the step, the draws'
seed, the answer's place and all tokens so far; on resume a call of the same key is not made again. A line is written
before anything is done with the answer, and survives the end of this process at once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from surefoot.methods.environments.replies import Reply, from_json
from surefoot.report import journal

_NAME = "turns-{}.jsonl"


class Recorded:
    """The record of a run.

    folder: the run's.
    rank: this process's; each writes a file of its own, and reads those of all.
    step: where the run begins or continues; what was heard before is not asked for again.
    """

    def __init__(self, folder: Path, rank: int, step: int):
        self._path, self._lock = folder / _NAME.format(rank), threading.Lock()
        self._known: dict[str, Reply] = {}
        for path in sorted(folder.glob(_NAME.format("*"))):
            lines, damaged = journal.salvage(path)
            if damaged and path == self._path:  # half a line, by a power failure
                journal.rewrite(path, lines)
            for line in lines:
                reply = from_json(line.get("reply"))
                if isinstance(line.get("step"), int) and line["step"] >= step and reply is not None:
                    self._known[str(line.get("key"))] = reply

    def find(self, key: str) -> Reply | None:
        return self._known.pop(key, None)

    def keep(self, step: int, key: str, reply: Reply) -> None:
        with self._lock:
            journal.append(self._path, {"step": step, "key": key, "reply": reply.to_json()})


def key_of(step: int, seed: int, place: int, ids: Sequence[int]) -> str:
    """The key of a call. ids: prompt and answer so far."""
    return hashlib.sha256(json.dumps([step, seed, place, *ids]).encode()).hexdigest()[:32]
