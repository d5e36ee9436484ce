"""Which key did the user mean? Looks beside the unknown key first, then over the whole tree and other tools' names."""

from __future__ import annotations

from surefoot.config.keys import Key, all_keys
from surefoot.config.other_names import OTHER_NAMES
from surefoot.system.nearest import CLOSE as CLOSE_BESIDE
from surefoot.system.nearest import likeness, plain_name

CLOSE = 0.8  # likeness (0 to 1) below which a name from another group is no suggestion


def nearest_key(path: str) -> Key | None:
    """The key most like an unknown dotted path, None where nothing is close."""
    keys = all_keys()
    group, _, name = path.rpartition(".")
    name = plain_name(name)
    neighbours = [key for key in keys.values() if key.group == group]
    if (
        group in keys
        and (beside := max(((likeness(name, key.name), key) for key in neighbours), key=_score))[0] >= CLOSE
    ):
        return beside[1]  # data.train.epoch is no misplaced duration
    if (known := OTHER_NAMES.get(name)) is not None:
        return keys[known]
    same_name = [key for key in keys.values() if key.name == name]
    if len(same_name) == 1:
        return same_name[0]
    ours = [(likeness(name, key.name), key) for key in keys.values()]
    theirs = [(likeness(name, other), keys[path]) for other, path in OTHER_NAMES.items()]
    beside = max((scored for scored in ours if scored[1].group == group), key=_score, default=(0.0, None))
    best = max((scored for scored in ours + theirs if _within(scored[1], group)), key=_score, default=(0.0, None))
    if beside[0] >= max(CLOSE_BESIDE, best[0] - 0.1):  # near its own group unless another name fits clearly better
        return beside[1]
    return best[1] if best[0] >= CLOSE else None


def _within(key: Key, group: str) -> bool:
    """In an existing group only its own keys are meant; an unknown group, or none, may stand for any."""
    return group not in all_keys() or key.group == group


def _score(scored: tuple[float, Key | None]) -> float:
    return scored[0]
