"""The built-in text of `capture`, `evaluate norms` and `verify --served`, and truncation of texts that keeps BOS.

A model trained with BOS at the start of every text gets it at the start of every window of a long text. Otherwise
another token would come first, and a scaled BOS multiplies the first embedding. BOS itself is never predicted, because
it is never a label in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from surefoot.methods.open_model import OpenModel
from surefoot.planning.plan import Choice
from surefoot.system.errors import Fault, InputError

TEXT = """\
The ferry leaves the island at seven, when the water is still grey and the gulls sit on the harbour wall. Marta carries
two crates of apricots aboard, counts them, and writes the number into a small blue book: 48 kilograms, six more than
last week. By nine she will stand behind her table on the square, between the cheesemaker and a man who mends clocks.

"How do you know which ones are ripe?" a child asks.

"I do not look, I listen," says Marta. "Tap one. A ripe apricot sounds tired." The child taps, frowns, taps again. The
clock mender laughs without looking up: "Mine sound tired all the time, and nobody eats them."

At noon the price falls from 4.20 to 3.50. Whoever waits too long buys the bruised ones, which make better jam; whoever
comes early pays for the colour. Marta explains this to every customer, and every customer nods and does the opposite.

for crate in crates: sold = min(crate.weight, demand(crate.price)); total = total + sold * crate.price

In the evening she subtracts the fare (12.80), the table (9.00) and one slice of cheese (2.50) from what lies in the tin
box, and writes the rest under the first number. Then the ferry turns its lights on, and the island comes closer again.
"""


def with_bos(opened: OpenModel, bos: bool | None) -> OpenModel:
    """Return the model with BOS before every text, or without; None changes nothing. Raises InputError if the tokenizer
    has no BOS."""
    if bos is None:
        return opened
    number = opened.encoder.tokenizer.bos_token_id
    if bos and not isinstance(number, int):
        raise InputError(Fault("--bos", "this model's tokenizer has no BOS token", "leave it out", code="SF-BOS"))
    tokens = replace(opened.tokens, bos=Choice(bos, "asked for", "user"), bos_id=number)
    return replace(opened, tokens=tokens, bos_id=number if bos else None)


def about_bos(opened: OpenModel, bos: bool | None) -> list[str]:
    """A caution if texts begin without the tokenizer's BOS although nobody asked for that."""
    if bos is not None or opened.bos_id is not None or opened.encoder.tokenizer.bos_token is None:
        return []
    token = opened.encoder.tokenizer.bos_token
    return [
        f"the text begins without {token}; a model with bos.scale begins with it, so its ids are shifted by one "
        f"there: use --bos to begin with {token} here too"
    ]


def last_tokens(ids: list[int], room: int, bos_id: int | None) -> list[int]:
    """The last `room` tokens; a leading BOS is kept. bos_id: None without one."""
    if len(ids) <= room:
        return ids
    front = ids[:1] if ids[0] == bos_id else []
    return [*front, *ids[len(ids) - room + len(front) :]]


def rolling_windows(
    ids: list[int], positions: int, *, prefix: int, bos_id: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, continuation) pairs: each token is predicted once, from as many tokens before it as fit into
    `positions` (at least 2).

    prefix: the token from which the first one is predicted.
    bos_id: put before every window and never predicted; None for a model without BOS, whose later windows begin in the
        middle of the text.
    """
    ids = ids[1:] if bos_id is not None and ids[:1] == [bos_id] else ids
    front = [] if bos_id is None else [bos_id]
    width = positions - len(front)  # tokens of the text in a later window
    if ids:
        yield front or [prefix], ids[:positions]
    for done in range(positions, len(ids), width):
        end = min(done + width, len(ids))
        yield [*front, *ids[end - width - 1 : done]], ids[done:end]
