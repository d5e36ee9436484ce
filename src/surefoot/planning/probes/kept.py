"""Cache of measurements in the user's cache folder: a machine, its libraries and a model's shapes rarely change.

    kept = open_kept()
    rates = kept.get("products", {"shape": [4096, 14336]}, dict[str, float], measure)

A file contains question and answer. A file that is damaged, or belongs to another question, machine or version, is
ignored and replaced; a folder that is not writable is tolerated. A result measured while other programs used the cores
is used only as long as they do, and then measured again: two threads have been a tenth as fast as one, and bf16 a fifth
as fast as alone, and every later run would have been planned with that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from surefoot.system import counters, durable, hardware, process
from surefoot.system.errors import EnvironmentFault

T = TypeVar("T")
_FORMAT = 2  # file format
_MEASURED_BY = ("kernels", "planning/probes")  # folders with the measured code and the probes


@dataclass(frozen=True)
class Kept:
    """The cache of measurements.

    folder: folder of the files.
    machine: everything besides the question that an answer depends on, as JSON values.
    """

    folder: Path
    machine: Mapping[str, Any]

    def get(
        self,
        name: str,
        question: Mapping[str, Any],
        kind: Any,
        measure: Callable[[], T],
        *,
        lasting: Callable[[T], bool] = lambda answer: True,
        cores: int = 1,
    ) -> T:
        """Return the cached answer, or what `measure` returns.

        name: name of the probe.
        question: JSON values.
        kind: the answer's type, for pydantic.
        lasting: whether an answer may be cached; temporary ones are not.
        cores: number of cores that measuring uses.
        """
        requested = _plain({"format": _FORMAT, "probe": name, "question": question, "machine": self.machine})
        digest = hashlib.sha256(json.dumps(requested, sort_keys=True).encode()).hexdigest()
        path, adapter = self.folder / f"{name}-{digest[:16]}.json", TypeAdapter(kind)
        known, crowded = _read(path, requested, adapter)
        if known is not None and not (crowded and counters.is_quiet(cores)):
            return known
        before = counters.read_counters()
        answer = measure()
        crowded = not counters.read_counters().since(before).left(cores)
        if not lasting(answer):
            return answer
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            record = {"asked": requested, "answer": adapter.dump_python(answer, mode="json"), "crowded": crowded}
            durable.write_json(path, record)
        except (
            OSError,
            EnvironmentFault,
        ):  # a full disk or another user's folder: it is measured again next time
            pass
        return answer

    def forget(self) -> None:
        """Delete all answers, so that everything is measured again."""
        for path in self.folder.glob("*.json"):
            durable.remove(path)


def open_kept() -> Kept:
    """Open the cache in the user's cache folder for this machine with its libraries, threads and environment variables,
    and for this version of the measured code."""
    return Kept(process.cache_folder() / "probes", {**hardware.describe(), "code": _code()})


def _code() -> str:
    """Digest that changes with the kernels and the probes."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in _MEASURED_BY:
        for path in sorted((package / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Convert to what JSON gives back: tuples become lists, keys strings."""
    return json.loads(json.dumps(value))


def _read(path: Path, requested: Any, adapter: TypeAdapter[Any]) -> tuple[Any, bool]:
    """Return the answer (None if there is none to this question), and whether other programs used the cores."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["asked"] != requested:
            return None, False
        return adapter.validate_python(content["answer"]), content["crowded"] is True
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None, False
