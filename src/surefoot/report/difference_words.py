"""How the screen calls what differs between two runs. JSON has the names of the records themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.planning.serial import Difference

_RANK = re.compile(r"rank (\d+)\.(.+)")
_OF_A_RANK = {
    "parameters": "parameters held",
    "gradients": "gradients held",
    "optimizer": "parameters with moments",
    "of": "parameters of the model",
    "of_trainable": "parameters that train",
}
# How far a fast path was off in the comparison before step 1, and how far it may be: measured on other rows by each
# run, by limits that its precision sets.
_MEASURED = re.compile(r"rank \d+\.fast_paths\..+\.(differs|limits|together)(\..+)?")


def spoken(part: str, differences: Sequence[Difference]) -> list[tuple[str, Difference]]:
    """Those that are shown, each with what it is called. part: config, plan, environment or data."""
    if part == "plan":
        # The plan's words on environment variables: these stand in the environment's own table.
        return [(one.path.removesuffix(".value"), one) for one in differences if one.path != "environment"]
    if part != "environment":
        return [(one.path, one) for one in differences]
    shown = [one for one in differences if not _MEASURED.fullmatch(one.path)]
    several = any(one.path.startswith("rank ") and not one.path.startswith("rank 0") for one in shown)
    return [(_of_environment(one.path, several), one) for one in shown]


def _of_environment(path: str, several: bool) -> str:
    """several: ranks; of one alone nobody needs its number."""
    if match := _RANK.fullmatch(path):
        name = _OF_A_RANK.get(match[2], match[2].replace("fast_paths.", "fast path "))
        return f"rank {match[1]}: {name}" if several else name
    return path.removeprefix("environment.")
