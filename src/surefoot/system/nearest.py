"""Did you mean …? The known name most like an unknown one, for every message that suggests one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

CLOSE = 0.65  # likeness (0 to 1) below which a name is no suggestion
MOST = 100  # unknown names of one file that get a suggestion: each takes milliseconds, and a file may hold thousands


def nearest_words(word: str, choices: Iterable[str], most: int, least: float = CLOSE) -> list[str]:
    """Up to `most` choices that are like `word`, the likest first; none below the likeness `least`."""
    scored = [(likeness(plain_name(word), plain_name(choice)), choice) for choice in choices]
    close = sorted((pair for pair in scored if pair[0] >= least), key=lambda pair: -pair[0])
    return [choice for _, choice in close[:most]]


def nearest_word(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, None where nothing is close."""
    return next(iter(nearest_words(word, choices, 1)), None)


def likeness(a: str, b: str) -> float:
    """1 for equal names, 0 for nothing in common. Letters in the wrong order cost little."""
    if sorted(a) == sorted(b):
        return 1.0 if a == b else 0.9
    return SequenceMatcher(None, a, b).ratio()


def plain_name(name: str) -> str:
    """Without what people write now so, now so: capitals, and dashes for underscores."""
    return name.lower().replace("-", "_")
