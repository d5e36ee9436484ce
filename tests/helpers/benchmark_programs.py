"""The programs of benchmarks/ as modules, and the words that `peers.py` understands, for tests."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402 (found through the line above)

RECORDS = [
    {"instruction": f"Count to {count}.", "input": "", "output": " ".join(f"then {number}," for number in range(count))}
    for count in range(40, 140)
]


def asked(*words: str, device: str = "cpu") -> Namespace:
    """As `peers.py` would read the words on a machine with this device."""
    parser = peers.arguments()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    found = parser.parse_args(["--threads", "1", *words])
    found.device = device
    return found
