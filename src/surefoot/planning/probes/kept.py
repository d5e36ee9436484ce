"""What was measured is kept in the user's cache folder: a machine, its libraries and the model's shapes stay the same.

    kept = open_kept()
    rates = kept.get("products", {"shape": [4096, 14336]}, dict[str, float], measure)

A file holds the question beside the answer. One that is damaged, or that answers another question, machine or version,
is ignored and replaced; a folder that cannot be written is no obstacle. What was measured while other programs had the
cores is right for as long as they have them, and measured again when they have not: two threads have been a tenth as
fast as one, and bf16 a fifth as fast as alone, and every later run would have been planned by that.
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
_FORMAT = 2  # of the files
_MEASURED_BY = ("kernels", "planning/probes")  # folders of the package: what is measured, and how


@dataclass(frozen=True)
class Kept:
    """The cache of measurements.

    folder: where the files are.
    machine: all that an answer depends on besides the question, JSON-able.
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
        """The kept answer, else what `measure` returns.

        name: of the probe.
        question: JSON-able.
        kind: the answer's type, for pydantic.
        lasting: whether an answer would be the same tomorrow; others are not kept.
        cores: that measuring takes.
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
        ):  # a full disk or a folder of somebody else's: it is measured again next time
            pass
        return answer

    def forget(self) -> None:
        """Of all machines and questions: everything is measured anew."""
        for path in self.folder.glob("*.json"):
            durable.remove(path)


def open_kept() -> Kept:
    """In the user's cache folder, for this machine with its libraries, threads and environment variables, and for this
    version of what is measured."""
    return Kept(process.cache_folder() / "probes", {**hardware.describe(), "code": _code()})


def _code() -> str:
    """A digest that differs after any change to the kernels or the probes."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in _MEASURED_BY:
        for path in sorted((package / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As it comes back from a file: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value))


def _read(path: Path, requested: Any, adapter: TypeAdapter[Any]) -> tuple[Any, bool]:
    """The answer, None where there is none to this question, and whether other programs had the cores meanwhile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["asked"] != requested:
            return None, False
        return adapter.validate_python(content["answer"]), content["crowded"] is True
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return None, False
