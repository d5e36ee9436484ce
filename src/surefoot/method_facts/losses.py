"""Facts about the losses of tokens, of DPO's family, of GRPO's, and of reward models: what each needs and which keys
it reads.

    PAIR_LOSSES["orpo"].reference       # False: it only compares the two answers with each other

A loss is one row here and one function in `surefoot.methods.losses`; `joined` checks that both exist.
`docs/preference.md` and `docs/grpo.md` describe the losses in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class LossFacts:
    """One loss of a method.

    reference: whether it compares with a reference policy. There is no default: a loss without one would otherwise load
        a reference silently and log rewards of 0.
    keys: keys of the method's section that this loss reads and losses without them refuse; keys that no row lists are
        read by all, except for
    unread: keys that this loss does not read and refuses.
    positive: of `keys`, those that must be above 0.
    sft: weight of the cross entropy of the chosen answers that is part of the loss by definition; it is added to the
        result of the loss's function.
    compared: what it compares, as the reason in the plan.
    """

    reference: bool
    keys: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    sft: float = 0.0
    compared: str = ""


TOKEN_LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "cross_entropy": LossFacts(reference=False),
        "dft": LossFacts(reference=False),
        "eaft": LossFacts(reference=False, keys=("alpha", "top", "entropy")),
        "asft": LossFacts(reference=True, keys=("kl",)),
    }
)

PAIR_LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "sigmoid": LossFacts(reference=True, keys=("label_smoothing",)),
        "ipo": LossFacts(reference=True),
        "hinge": LossFacts(reference=True),
        "orpo": LossFacts(reference=False, sft=1.0),
        "simpo": LossFacts(reference=False, keys=("margin",)),
        "cpo": LossFacts(reference=False, keys=("label_smoothing",), sft=1.0),
        "sigmoid_norm": LossFacts(reference=True),
        "robust": LossFacts(reference=True, keys=("label_smoothing",)),
        "exo_pair": LossFacts(reference=True, keys=("label_smoothing",), positive=("label_smoothing",)),
        "nca_pair": LossFacts(reference=True),
        "bco_pair": LossFacts(reference=True),
        "sppo_hard": LossFacts(reference=True),
        "apo_zero": LossFacts(reference=True),
        "apo_down": LossFacts(reference=True),
        "discopop": LossFacts(reference=True),
    }
)


def keys_of(losses: Mapping[str, LossFacts]) -> tuple[str, ...]:
    """Keys of a section that only some of its losses read."""
    return tuple(dict.fromkeys(key for loss in losses.values() for key in loss.keys))


@dataclass(frozen=True, kw_only=True)
class GroupLossFacts(LossFacts):
    """One loss of stage grpo.

    source: paper or code that defines it.
    ratio: whose probability ratio is clipped. token: each token's. sequence: the geometric mean over an answer's
        tokens.
        answer: their product.
    mean: what the loss is a mean over. tokens: all tokens of a step. answers: the answers of a step, each a mean over
        its own tokens. limit: the answers of a step, each a sum over its tokens divided by max_new_tokens.
    baseline: subtracted from a score. group: the mean of its group. others: the mean of the other answers of its group.
        step: the mean of the rollout.
    scale: divisor of the difference: the standard deviation of its group, of the rollout, or none.
    clip: maximum distance of a ratio below and above 1; None: unlimited.
    weighs: whether the clipped ratio is a weight of the log-probability without gradient (CISPO); else it is optimized.
    penalty: where the KL to the reference enters: in the loss of each token (k3), or in the score.
    """

    reference: bool = False  # decided by grpo.kl
    source: str
    ratio: Literal["token", "sequence", "answer"] = "token"
    mean: Literal["tokens", "answers", "limit"] = "tokens"
    baseline: Literal["group", "others", "step"] = "group"
    scale: Literal["group", "step", "none"] = "group"
    clip: tuple[float | None, float] = (0.2, 0.2)
    weighs: bool = False
    penalty: Literal["loss", "score"] = "loss"

    @property
    def unit(self) -> str:
        """Unit of a batch's weight."""
        return "response_tokens" if self.mean == "tokens" else "answers"


# Importance weights for tokens sampled by another engine (`surefoot.methods.losses.mismatch`); TRL's names.
CorrectionKind = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

GROUP_LOSSES: Mapping[str, GroupLossFacts] = MappingProxyType(
    {
        "dapo": GroupLossFacts(source="Yu et al. 2025, arXiv 2503.14476", clip=(0.2, 0.28)),
        "grpo": GroupLossFacts(source="Shao et al. 2024, arXiv 2402.03300", mean="answers"),
        "bnpo": GroupLossFacts(source="TRL's bnpo: GRPO with one mean over the tokens of a step"),
        "dr_grpo": GroupLossFacts(source="Liu et al. 2025, arXiv 2503.20783", mean="limit", scale="none"),
        "cispo": GroupLossFacts(source="MiniMax 2025, arXiv 2506.13585", clip=(None, 4.0), weighs=True),
        "gspo": GroupLossFacts(
            source="Zheng et al. 2025, arXiv 2507.18071", ratio="sequence", mean="answers", clip=(3e-4, 4e-4)
        ),
        "rloo": GroupLossFacts(
            source="Ahmadian et al. 2024, arXiv 2402.14740",
            ratio="answer",
            mean="answers",
            baseline="others",
            scale="none",
            penalty="score",
        ),
        "reinforce++": GroupLossFacts(
            source="Hu 2025, arXiv 2501.03262", baseline="step", scale="step", penalty="score"
        ),
    }
)

# Losses and methods that are not there, and what does the same.
OTHER_WAYS: Mapping[str, str] = MappingProxyType(
    {"online_dpo": "draw with `surefoot evaluate answers --pairs` and train on the pairs with stage: dpo, in rounds"}
)

NO_REFERENCE = "none"  # of alignment.reference


def own_pair_loss(*, reference: bool) -> LossFacts:
    """Return the facts of a user's pair loss, FILE.py:FUNCTION in the config. alignment.loss gets every constant of the
    section.

    reference: whether it uses a reference, as set in the config.
    """
    compared = "both answers are compared by your own loss"
    return LossFacts(reference=reference, keys=keys_of(PAIR_LOSSES), compared=compared)


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


def joined(facts: Mapping[str, object], functions: Mapping[str, Row], tables: tuple[str, str]) -> Mapping[str, Row]:
    """Return the functions, after checking that every method, loss, format or key of a loss has facts and a function.

    facts: rows of the methods, or of a family of losses, by name.
    functions: their functions, by name.
    tables: "module.TABLE" of both, within surefoot, for the error.

    Raises RuntimeError at import for a name that has only one of the two.
    """
    for name in sorted(facts.keys() ^ functions.keys()):
        there, missing = tables if name in facts else tables[::-1]
        raise RuntimeError(f"{name!r} is in surefoot.{there} but not in surefoot.{missing}")
    return functions


def read_by(key: str, losses: Mapping[str, LossFacts]) -> tuple[str, ...]:
    """Losses that read a key of the section; empty for a key that all of them read."""
    return tuple(name for name, loss in losses.items() if key in loss.keys)
