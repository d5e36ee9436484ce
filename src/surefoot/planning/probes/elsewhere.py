"""Measure matrix products in a child process without some environment variables.

Libraries read such variables when they are loaded, so unsetting them in this process has no effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence

import torch

from surefoot.planning.plan import DType
from surefoot.planning.probes.matmul import product_rates
from surefoot.system import process

_PATIENCE = 120.0  # seconds, mostly for importing torch
_PROGRAM = (sys.executable, "-m", "surefoot.planning.probes.elsewhere")


def rates_without(
    names: Collection[str],
    shape: tuple[int, int],
    dtypes: Sequence[DType],
    kind: str,
    *,
    program: Sequence[str] = _PROGRAM,
) -> dict[DType, float]:
    """Return `product_rates` of a child without the variables `names`; empty if it fails. kind: cpu | cuda."""
    requested = json.dumps({"shape": shape, "dtypes": list(dtypes), "kind": kind})
    try:
        done = subprocess.run(
            program,
            input=requested,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            env=process.environment_without(names),
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return {}


def main() -> None:
    """Entry point of the child."""
    requested = json.loads(sys.stdin.read())
    print(
        json.dumps(
            product_rates([tuple(requested["shape"])], torch.device(requested["kind"]), dtypes=requested["dtypes"])
        )
    )


if __name__ == "__main__":
    main()
