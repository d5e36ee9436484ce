"""What environments replied, stored in the run folder so that a step which is repeated gets the same again.

`turns-RANK.jsonl` has a line for each call: the step, a key, and the reply or how both attempts failed; with a reply to
the second attempt `tries: 2`. The key is a hash of the step, the draws' seed, the answer's place and all tokens so far;
on resume a call of the same key is not made again. A line is written before anything is done with the reply, and
survives the end of this process at once.

A run that ended because of its lost answers leaves a line `again`: the cause may have been removed before a resume, so
failures before this line are not taken over.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.methods.environments.replies import Lost, Reply, from_json, to_json
from surefoot.report import journal

_NAME = "turns-{}.jsonl"


@dataclass(frozen=True)
class Kept:
    """tries: calls that were made; for one that is lost, all of them failed."""

    said: Reply | Lost
    tries: int


class Recorded:
    """The record of a run.

    folder: the run's.
    rank: this process's; each writes a file of its own, and reads those of all.
    step: where the run begins or continues; earlier calls are not looked up again.
    """

    def __init__(self, folder: Path, rank: int, step: int):
        self._path, self._lock = folder / _NAME.format(rank), threading.Lock()
        self._known: dict[str, Kept] = {}
        for path in sorted(folder.glob(_NAME.format("*"))):
            if path == self._path:
                journal.cut_end(path, lambda line: True)  # half a line, by a power failure
            own: dict[str, Kept] = {}
            for _, _, line in journal.lines(path):
                if "again" in line:
                    own = {key: one for key, one in own.items() if isinstance(one.said, Reply)}
                elif isinstance(line.get("step"), int) and line["step"] >= step and (said := from_json(line)):
                    own[str(line.get("key"))] = Kept(said, line.get("tries", 1))
            self._known |= own

    def find(self, key: str) -> Kept | None:
        return self._known.pop(key, None)

    def keep(self, step: int, key: str, kept: Kept) -> None:
        tries = {"tries": kept.tries} if kept.tries > 1 else {}
        self._append({"step": step, "key": key, **tries, **to_json(kept.said)})

    def ask_again(self, step: int) -> None:
        """Let a resumed run repeat the calls that failed."""
        self._append({"step": step, "again": True})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            journal.append(self._path, line)


def key_of(step: int, seed: int, place: int, ids: Sequence[int]) -> str:
    """The key of a call. ids: prompt and answer so far."""
    return hashlib.sha256(json.dumps([step, seed, place, *ids]).encode()).hexdigest()[:32]
