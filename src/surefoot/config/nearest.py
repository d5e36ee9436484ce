"""Which key did the user mean? Looks beside the unknown key first, then over the whole tree and other tools' names."""

from __future__ import annotations

from difflib import SequenceMatcher

from surefoot.config.keys import Key, all_keys
from surefoot.config.other_names import OTHER_NAMES

CLOSE = 0.8  # likeness (0 to 1) below which a name from another group is no suggestion
CLOSE_BESIDE = 0.65  # the same among the keys of the group in which the unknown key stands


def nearest_key(path: str) -> Key | None:
    """The key most like an unknown dotted path, None where nothing is close."""
    keys = all_keys()
    group, _, name = path.rpartition(".")
    name = _plain(name)
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


def nearest_word(word: str, choices: tuple[str, ...] | list[str]) -> str | None:
    """The choice most like `word`, None where nothing is close."""
    score, choice = max(((likeness(_plain(word), _plain(choice)), choice) for choice in choices), default=(0.0, ""))
    return choice if score >= CLOSE_BESIDE else None


def likeness(a: str, b: str) -> float:
    """1 for equal names, 0 for nothing in common. Letters in the wrong order cost little."""
    if sorted(a) == sorted(b):
        return 1.0 if a == b else 0.9
    return SequenceMatcher(None, a, b).ratio()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _score(scored: tuple[float, Key | None]) -> float:
    return scored[0]
