"""Records, and arguments for `benchmarks/peers.py`, for tests of the benchmarks."""

from argparse import Namespace
from pathlib import Path

import peers

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [
    {"instruction": f"Count to {count}.", "input": "", "output": " ".join(f"then {number}," for number in range(count))}
    for count in range(40, 140)
]


def asked(*words: str, device: str = "cpu") -> Namespace:
    """Parse arguments as `peers.py` does on a machine with this device."""
    parser = peers.arguments()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    found = parser.parse_args(["--threads", "1", *words])
    found.device = device
    return found
