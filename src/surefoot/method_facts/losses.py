"""The losses of DPO's family and of reward models, as facts: what each needs and which keys it reads.

    PAIR_LOSSES["orpo"].reference       # False: it compares the two answers with each other alone

A loss is one row here and one function in `surefoot.methods.losses`; `joined` lets neither exist without the other.
`docs/preference.md` describes each in its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class LossFacts:
    """One loss of a method.

    reference: whether it compares with a reference policy. There is no default: a loss that needs none would otherwise
        open one in silence and log rewards of 0.
    keys: of the method's section, that this loss reads and losses without them refuse; a key that no row names is read
        by all.
    sft: weight of the cross entropy of the better answers that belongs to the loss by definition; it is added to what
        the loss's function returns.
    compared: what it compares, as the plan gives its reason.
    """

    reference: bool
    keys: tuple[str, ...] = ()
    sft: float = 0.0
    compared: str = ""


PAIR_LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "sigmoid": LossFacts(reference=True, keys=("label_smoothing",)),
        "ipo": LossFacts(reference=True),
        "hinge": LossFacts(reference=True),
        "orpo": LossFacts(reference=False, sft=1.0),
        "simpo": LossFacts(reference=False, keys=("margin",)),
        "cpo": LossFacts(reference=False, keys=("label_smoothing",), sft=1.0),
    }
)

NO_REFERENCE = "none"  # of alignment.reference


def own_pair_loss(*, reference: bool) -> LossFacts:
    """The facts of a loss of pairs that the config names as FILE.py:FUNCTION. alignment.loss is given every constant of
    its section.

    reference: whether it compares with one, which the config says.
    """
    keys = ("label_smoothing", "margin")
    return LossFacts(reference=reference, keys=keys, compared="both answers are compared by a loss of your own")


REWARD_LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "last": LossFacts(reference=False, compared="the scores at the last tokens of both answers are compared"),
        "divergence": LossFacts(
            reference=False,
            keys=("num_padding_at_beginning",),
            compared="the values from the first difference to the end of the longer answer are compared",
        ),
    }
)


def joined(facts: Mapping[str, object], functions: Mapping[str, Row]) -> Mapping[str, Row]:
    """The functions, once every method or loss has both halves.

    facts: the rows of the methods, or of a family of losses, by name.
    functions: what they compute, by name.

    Raises RuntimeError, where the module of the functions is imported, for a name that has only one of the two.
    """
    if half := facts.keys() ^ functions.keys():
        raise RuntimeError(f"has its facts alone or its functions alone: {', '.join(sorted(half))}")
    return functions


def read_by(key: str, losses: Mapping[str, LossFacts]) -> tuple[str, ...]:
    """The losses that read a key of the section; empty for a key that all of them read."""
    return tuple(name for name, loss in losses.items() if key in loss.keys)
