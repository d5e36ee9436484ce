"""Whether measured texts begin with BOS. A model that was trained with a scaled BOS begins with it, its base may not;
then every token of one stands a place later than in the other, and the two cannot be compared position by position.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.methods.open_model import OpenModel
from surefoot.planning.plan import Choice
from surefoot.system.errors import Fault, InputError


def with_bos(opened: OpenModel, asked: bool | None) -> OpenModel:
    """The same with BOS before every text, or without; None leaves it as the model was trained. Raises InputError where
    the tokenizer has none."""
    if asked is None:
        return opened
    number = opened.encoder.tokenizer.bos_token_id
    if asked and not isinstance(number, int):
        raise InputError(Fault("--bos", "this model's tokenizer has no BOS", "leave it out", code="SF-BOS"))
    tokens = replace(opened.tokens, bos=Choice(asked, "asked for", "user"), bos_id=number)
    return replace(opened, tokens=tokens, bos_id=number if asked else None)


def about_bos(opened: OpenModel, asked: bool | None) -> list[str]:
    """A sentence where texts begin without a BOS that the tokenizer has, and nobody asked for that."""
    if asked is not None or opened.bos_id is not None or opened.encoder.tokenizer.bos_token is None:
        return []
    token = opened.encoder.tokenizer.bos_token
    return [
        f"the text begins without {token}, with which a model of bos.scale begins, so its ids stand one place later "
        f"there: --bos begins with {token} here too"
    ]
