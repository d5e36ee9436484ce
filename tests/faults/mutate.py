"""Good inputs changed at random, fast: tens of thousands a second.

    mutated(random.Random(7), [b"a: 1\\n", b"b: [2]\\n"], [b"&x", b"!!"])

A pure function of the seed, so that one number makes an input again. Each input is one of the good ones after one to
eight changes: cut, overwritten, shortened, repeated, joined with another, with lines exchanged, or with a number or a
word replaced. `mutated_tree` does the like to values, `mutated_words` to the words of a command.
"""

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

MOST = 200_000  # bytes, of an input: what takes long has to do so by being hard, not by being large
_CHANGES = (1, 1, 1, 1, 2, 2, 2, 3, 4, 8)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_NUMBERS = (
    b"0 -1 1 2 1e999 -1e999 1e-400 nan NaN Infinity .inf 0.1 1_000 0x1F 010 1:30 9223372036854775808 "
    b"99999999999999999999 1e18 3.5 true null -0 1e1000000 " + b"9" * 5000
).split()
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 1.5, 1e308, 5e-324, float("nan"), float("inf"),
    float("-inf"), "", " ", "a", "0", "1e5", "-1", "nan", "auto", "none", "on", "²", "٣", "\ud800", "\x00", "\n",
    "../a", "/", "~", "a" * 300, "%s", "{{ a }}", "\ufeff", [], {}, [None], [[]], [{}], {"": None}, {"a": {"a": []}},
    [1, "a", None], ["a", "a"], {"0": 1}, {"a.b": 1},
)  # fmt: skip


def mutated(draw: Random, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    """One of `good`, changed. pieces: what means something in this language and is put in here and there."""
    content = draw.choice(good)
    for _ in range(draw.choice(_CHANGES)):
        content = draw.choice(_WAYS)(draw, content, good, pieces)
    return content[:MOST]


def mutated_text(draw: Random, good: Sequence[bytes], pieces: Sequence[bytes]) -> str:
    return mutated(draw, good, pieces).decode("utf-8", "replace")


def mutated_tree(draw: Random, tree: Any, odd: Sequence[Any] = ODD_VALUES) -> Any:
    """A copy with one to eight values, at any depth, replaced, taken out, put under another key, or exchanged."""
    tree = _copied(tree)
    for _ in range(draw.choice(_CHANGES)):
        places = list(_places(tree))
        if not places:
            return draw.choice(odd)
        holder, key = draw.choice(places)
        way = draw.randrange(8)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            its = draw.choice(places)[1]
            name = its if isinstance(its, str) else draw.choice(("", "0", "a.b", "²", "type"))
            holder[name] = holder.pop(key)
        elif way == 2:
            other, its = draw.choice(places)
            holder[key] = _copied(other[its])
        elif way == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * draw.choice((2, 3, 50))
        else:
            holder[key] = _copied(draw.choice(odd))
    return tree


def mutated_words(draw: Random, good: Sequence[Sequence[str]], odd: Sequence[str]) -> list[str]:
    """One of the commands with words left out, replaced, added, exchanged, taken from others, or given other values."""
    words = list(draw.choice(good))
    for _ in range(draw.choice(_CHANGES)):
        at = draw.randrange(len(words) + 1)
        new = draw.choice(odd) if draw.random() < 0.5 else draw.choice(draw.choice(good))
        way = draw.randrange(6)
        if way == 0 or at == len(words):
            words.insert(at, new)
        elif way == 1:
            del words[at]
        elif way == 2:
            words[at] = new
        elif way == 3:
            words[at] = f"{words[at].partition('=')[0]}={new}"
        elif way == 4:
            letters = mutated_text(draw, [words[at].encode("utf-8", "replace")], [b"=", b"-", b",", b"[", b"'"])
            words[at] = letters[:500]
        else:
            other = draw.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    return words


def _copied(value: Any) -> Any:
    """A deep copy of plain values, ten times as fast as copy.deepcopy."""
    if isinstance(value, dict):
        return {key: _copied(held) for key, held in value.items()}
    return [_copied(held) for held in value] if isinstance(value, list) else value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, under which key or number), for each value below."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in items:
        yield value, key
        yield from _places(held)


def _stretch(draw: Random, content: bytes) -> tuple[int, int]:
    """Mostly short, sometimes anything."""
    start = draw.randrange(len(content) + 1)
    most = len(content) - start if draw.random() < 0.2 else min(len(content) - start, 16)
    return start, start + draw.randint(0, most)


def _cut(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] if draw.random() < 0.7 else content[at:]


def _overwritten(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(content) + 1)
    new = (
        draw.randbytes(draw.randint(1, 4)) if draw.random() < 0.5 else bytes([draw.choice(b"\"'{}[]:,-#&*!|>%@ \n\t")])
    )
    return content[:at] + new + content[at + len(new) :]


def _shortened(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    start, end = _stretch(draw, content)
    return content[:start] + content[end:]


def _repeated(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    start, end = _stretch(draw, content)
    return content[:end] + content[start:end] * draw.choice((1, 1, 2, 7, 60)) + content[end:]


def _with_piece(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(content) + 1)
    end = at if draw.random() < 0.6 else _stretch(draw, content)[1]
    return content[:at] + draw.choice(pieces) + content[max(at, end) :]


def _joined(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    other = draw.choice(good)
    return content[: draw.randrange(len(content) + 1)] + other[draw.randrange(len(other) + 1) :]


def _with_other_lines(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    lines = content.split(b"\n")
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            lines[a], lines[b] = lines[b], lines[a]
        case 1:
            lines.insert(a, lines[b])
        case 2:
            del lines[a]
        case _:
            lines.insert(a, draw.choice(draw.choice(good).split(b"\n")))
    return b"\n".join(lines)


def _with_other(
    pattern: re.Pattern[bytes], draw: Random, content: bytes, others: Sequence[bytes], good: Sequence[bytes]
) -> bytes:
    found = list(pattern.finditer(content))
    if not found:
        return content
    place = draw.choice(found)
    from_elsewhere = pattern.findall(draw.choice(good)) if draw.random() < 0.5 else ()
    new = draw.choice(from_elsewhere or others)
    return content[: place.start()] + new + content[place.end() :]


def _with_other_number(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    return _with_other(_NUMBER, draw, content, _NUMBERS, good)


def _with_other_word(draw: Random, content: bytes, good: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    return _with_other(_WORD, draw, content, pieces, good)


_WAYS = (
    _cut, _overwritten, _overwritten, _shortened, _repeated, _with_piece, _with_piece, _joined, _with_other_lines,
    _with_other_number, _with_other_word,
)  # fmt: skip
