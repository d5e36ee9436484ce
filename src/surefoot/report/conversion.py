"""qat.json: compares the loss of a model converted after training with `precision.qat` with the loss in training.

to, group_size, layers: the type, the group size and the number of converted layers.
step: the step of the converted weights.
rows, tokens: the data of the losses, which are means in nats.
logged: the loss logged by the run.
trained: the loss with the layers that round (fake quantization).
converted: the loss with the layers that hold numbers of fewer bits.
reloaded: the loss of the folder `quantised` loaded by transformers; absent for an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.system import plain_files
from surefoot.system.errors import Fault
from surefoot.system.folders import CONVERSION

# On a GPU a converted layer may use another kernel: relative tolerance of bf16 rounding over some layers.
_OTHER_KERNELS = 1e-3
# The logged loss used surefoot's kernels and packed rows; the wrong weights would differ by more.
_OWN_KERNELS = 1e-2


def agrees(record: Mapping[str, Any]) -> bool:
    """Whether all losses agree: bit for bit on a CPU, except the logged one."""
    trained, logged = record["trained"], record.get("logged")
    others = [record[key] for key in ("converted", "reloaded") if key in record]
    if any(one is None for one in (trained, *others)):  # not finite
        return False
    allowed = 0.0 if record["device"] == "cpu" else _OTHER_KERNELS * abs(trained)
    same = all(abs(one - trained) <= allowed for one in others)
    return same and (logged is None or abs(logged - trained) <= _OWN_KERNELS * abs(trained))


def read_conversion(run: Path) -> dict[str, Any] | None:
    """Return the record, None if the run converted nothing."""
    path = run / CONVERSION
    return json.loads(plain_files.read_text(path)) if path.is_file() else None


def conversion_line(record: Mapping[str, Any]) -> str:
    """Describe the comparison in one sentence."""
    groups = f" in groups of {record['group_size']}" if record["group_size"] else ""
    losses = [
        f"{key} {record[key]:.6g}"
        for key in ("logged", "trained", "converted", "reloaded")
        if record.get(key) is not None
    ]
    over = f"{record['tokens']:,} tokens {record['rows']}"
    what = f"precision.qat: {record['layers']} layers converted to {record['to']}{groups}"
    return f"{what}; loss over {over}: {', '.join(losses)}"


def disagreement(record: Mapping[str, Any]) -> str:
    """The message for losses that differ."""
    return f"{conversion_line(record)}: the losses differ, so the converted model is not the trained one"


def conversion_faults(run: Path) -> list[Fault]:
    """Faults for `surefoot verify`."""
    record = read_conversion(run)
    if record is None or agrees(record):
        return []
    return [
        Fault(
            str(run / CONVERSION), disagreement(record), "convert the published weights again", code="SF-VERIFY-DIFFERS"
        )
    ]
