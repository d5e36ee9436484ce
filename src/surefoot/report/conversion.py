"""qat.json: whether what a run with `precision.qat` converted has the loss that training saw.

to, group_size, layers: what was converted, and how. step: whose weights. rows, tokens: what the losses are over; they
are means in nats. logged: by the run itself. trained: by the layers that round. converted: by those that hold integers.
reloaded: as transformers reads them from the folder `quantised`; not where an adapter was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.system import plain_files
from surefoot.system.errors import Fault

NAME, FOLDER = "qat.json", "quantised"
# On a GPU a converted layer may take another kernel: a share of the loss, that of bf16's rounding over some layers.
_OTHER_KERNELS = 1e-3
# Of surefoot's own kernels and packed rows, which the logged loss was computed with; other weights differ by more.
_OWN_KERNELS = 1e-2


def agrees(record: Mapping[str, Any]) -> bool:
    """Whether all losses are the same: on a CPU to the bit, but for the logged one."""
    trained, logged = record["trained"], record.get("logged")
    others = [record[key] for key in ("converted", "reloaded") if key in record]
    if any(one is None for one in (trained, *others)):  # not finite
        return False
    allowed = 0.0 if record["device"] == "cpu" else _OTHER_KERNELS * abs(trained)
    same = all(abs(one - trained) <= allowed for one in others)
    return same and (logged is None or abs(logged - trained) <= _OWN_KERNELS * abs(trained))


def read_conversion(run: Path) -> dict[str, Any] | None:
    """None where the run converted nothing."""
    path = run / NAME
    return json.loads(plain_files.read_text(path)) if path.is_file() else None


def conversion_line(record: Mapping[str, Any]) -> str:
    """One sentence for people."""
    groups = f" in groups of {record['group_size']}" if record["group_size"] else ""
    losses = [f"{key} {record[key]:.6g}" for key in ("logged", "trained", "converted", "reloaded") if _has(record, key)]
    over = f"{record['tokens']:,} tokens {record['rows']}"
    what = f"precision.qat: {record['layers']} layers converted to {record['to']}{groups}"
    return f"{what}; loss over {over}: {', '.join(losses)}"


def disagreement(record: Mapping[str, Any]) -> str:
    """What is to be said where the losses differ."""
    return f"{conversion_line(record)}: they differ, so what was converted is not what was trained"


def conversion_faults(run: Path) -> list[Fault]:
    """What `surefoot verify` has against it."""
    record = read_conversion(run)
    if record is None or agrees(record):
        return []
    return [
        Fault(str(run / NAME), disagreement(record), "convert the published weights again", code="SF-VERIFY-DIFFERS")
    ]


def _has(record: Mapping[str, Any], key: str) -> bool:
    return record.get(key) is not None
