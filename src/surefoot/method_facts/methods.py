"""Facts about the training methods: data, models, config keys and fast paths of each value of `stage`.

    METHODS["dpo"].records              # "pairs"
    config.method.packs                 # the same row, from a run's config

No module outside `surefoot.methods` compares a method's name; all read the row. A method's functions are a row of
`surefoot.methods.table`; each requires the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from surefoot.method_facts.losses import GROUP_LOSSES, PAIR_LOSSES, REWARD_LOSSES, TOKEN_LOSSES, LossFacts, keys_of

Records = Literal["answers", "pairs", "judged", "prompts"]
Unit = Literal["tokens", "pairs", "answers", "response_tokens"]
"""Unit of a batch's weight, over which the loss is a mean: supervised tokens, pairs, answers, or tokens of the policy's
responses."""

COUNTED: Mapping[Records, str] = MappingProxyType(
    {"answers": "examples", "pairs": "pairs", "judged": "answers", "prompts": "prompts"}
)
"""Unit of batch.size, held-out records and audits, by record kind."""

FORMATS: Mapping[str, Records] = MappingProxyType(
    {
        "tokens": "answers",
        "alpaca": "answers",
        "sharegpt": "answers",
        "messages": "answers",
        "cauldron": "answers",
        "query-response": "answers",
        "prompt-completion": "answers",
        "text": "answers",
        "commonsense": "answers",
        "preference": "pairs",
        "judged": "judged",
        "swift-pairs": "pairs",
        "token-pairs": "pairs",
        "token-judged": "judged",
        "prompts": "prompts",
    }
)
"""Values of data.format with the record kind of each. `surefoot.data.formats.registry` reads them."""

OF_TOKENS = ("tokens", "token-pairs", "token-judged")
"""Formats whose records are token ids."""

WITHOUT_TURNS = (*OF_TOKENS, "text")
"""Formats whose records no template formats."""


def formats_for(records: Records) -> tuple[str, ...]:
    """Formats of this record kind."""
    return tuple(name for name, become in FORMATS.items() if become == records)


@dataclass(frozen=True)
class MethodFacts:
    """One training method.

    title: its name in prose, for the model card.
    records: record kind of its data, see `surefoot.data.sources.records`.
    formats: values of data.format besides auto and custom; None: any.
    unit: what its loss is a mean over.
    rows: rows of a batch per example whose activations are kept; not those that are only compared with.
    counts: unit of batch.size, if not the records.
    section: config section that the method reads; None: it has none.
    own_keys: keys of that section that no other method reads.
    losses: by the value of the section's key `loss`; empty if the method has one loss.
    metrics: metrics of every evaluation, higher is better; checkpoint.best may name them.
    pictures: whether its records may have images.
    learns_tokens: whether it trains on marked tokens by cross entropy, so that data.train_on, data.encoding and NEFTune
        apply. The others compare whole answers.
    plain_texts: whether examples are texts without turns, split into as many pieces as needed.
    compared: comparison to which dropout would add noise; empty if dropout does no harm.
    reference: whether its loss may use a reference policy, so that alignment.reference applies.
    other_prompts: whether each step also pairs its prompts with each other's answers, so that a step needs two examples
        and their log-probabilities cannot be precomputed.
    scores: whether it trains a value head, and neither computes logits nor generates.
    rollouts: whether it generates answers during training, and learns from them.
    teacher: whether it learns from the distributions of another model.
    critic: whether it trains a critic besides the policy, and may have a reward model.
    weighs_answers: whether the loss needs the log-probability of every answer before the weight of each is known, so
        that a trained head cannot be computed in chunks.
    packs: whether the documents of a step can go through the model as one packed row.
    shares_prompts: whether the common prefix of a pair can be computed once.
    one_pass: whether a step is exactly one forward and one backward pass over its rows, so that its FLOPs are known.
    proposed: whether `surefoot init` chooses it for such records if no method is named.
    first_rate: learning rate of an adapter that `surefoot init` proposes.
    large_rate: usual learning rate for full fine-tuning of about 8 B parameters; None: unknown.
    """

    title: str
    records: Records
    formats: tuple[str, ...] | None
    unit: Unit = "tokens"
    rows: int = 1
    counts: str = ""
    section: str | None = None
    own_keys: tuple[str, ...] = ()
    losses: Mapping[str, LossFacts] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    pictures: bool = False
    learns_tokens: bool = False
    plain_texts: bool = False
    compared: str = ""
    reference: bool = False
    other_prompts: bool = False
    scores: bool = False
    rollouts: bool = False
    teacher: bool = False
    critic: bool = False
    weighs_answers: bool = False
    packs: bool = True
    shares_prompts: bool = False
    one_pass: bool = False
    proposed: bool = False
    first_rate: float = 1e-4
    large_rate: float | None = None

    @property
    def counted(self) -> str:
        """Unit of batch.size."""
        return self.counts or COUNTED[self.records]


_RANKED = ("reward_accuracy", "reward_margin")

METHODS: Mapping[str, MethodFacts] = MappingProxyType(
    {
        "pretrain": MethodFacts(
            title="continued pretraining",
            records="answers",
            formats=("text",),
            section="sft",
            losses=TOKEN_LOSSES,
            learns_tokens=True,
            plain_texts=True,
            one_pass=True,
            first_rate=5e-5,
        ),
        "sft": MethodFacts(
            title="supervised fine-tuning",
            records="answers",
            formats=(*formats_for("answers"), *formats_for("pairs")),  # of a pair it learns the chosen answer
            section="sft",
            losses=TOKEN_LOSSES,
            pictures=True,
            learns_tokens=True,
            one_pass=True,
            proposed=True,
            first_rate=2e-4,
            large_rate=2e-5,
        ),
        "reward": MethodFacts(
            title="reward modeling on pairs of answers",
            records="pairs",
            formats=formats_for("pairs"),
            unit="pairs",
            rows=2,
            section="reward",
            losses=REWARD_LOSSES,
            metrics=_RANKED,
            pictures=True,
            compared="scores of two answers are compared",
            scores=True,
            shares_prompts=True,
            one_pass=True,
            first_rate=1e-4,
            large_rate=5e-6,
        ),
        "dpo": MethodFacts(
            title="direct preference optimization",
            records="pairs",
            formats=formats_for("pairs"),
            unit="pairs",
            rows=2,
            section="alignment",
            own_keys=("loss", *keys_of(PAIR_LOSSES), "sft", "sft_prompt"),
            losses=PAIR_LOSSES,
            metrics=_RANKED,
            pictures=True,
            compared="log-probabilities of two answers and of two models are compared",
            reference=True,
            weighs_answers=True,
            proposed=True,
            first_rate=5e-6,
        ),
        "kto": MethodFacts(
            title="Kahneman-Tversky optimization",
            records="judged",
            formats=formats_for("judged"),
            unit="answers",
            section="alignment",
            own_keys=("good", "bad"),
            metrics=_RANKED,
            pictures=True,
            compared="log-probabilities of two models are compared",
            reference=True,
            other_prompts=True,
            weighs_answers=True,
            proposed=True,
            first_rate=5e-6,
        ),
        "ppo": MethodFacts(
            title="proximal policy optimization",
            records="prompts",
            formats=None,
            unit="response_tokens",
            section="ppo",
            metrics=("reward", "ended"),
            compared="log-probabilities before and after an update are compared",
            rollouts=True,
            critic=True,
            packs=False,
            first_rate=1e-5,
            large_rate=5e-7,
        ),
        "grpo": MethodFacts(
            title="group relative policy optimization",
            records="prompts",
            formats=None,
            unit="response_tokens",
            counts="answers",
            section="grpo",
            losses=GROUP_LOSSES,
            metrics=("reward", "ended"),
            pictures=True,
            compared="log-probabilities before and after an update are compared",
            reference=True,
            rollouts=True,
            packs=False,
            first_rate=1e-5,
            large_rate=1e-6,
        ),
        "distill": MethodFacts(
            title="distillation",
            records="answers",
            formats=formats_for("answers"),
            section="distill",
            metrics=("agreement",),
            learns_tokens=True,
            compared="distributions of two models are compared",
            teacher=True,
            first_rate=2e-4,
            large_rate=2e-5,
        ),
    }
)


def methods_of(section: str) -> tuple[str, ...]:
    """The methods that read a config section."""
    return tuple(name for name, method in METHODS.items() if method.section == section)


def methods_for(records: Records, *, plain_texts: bool = False) -> str:
    """The methods that learn from such records, for a message: "reward or dpo".

    records: record kind.
    plain_texts: for answers, whether they are texts without turns.
    """
    fitting = (name for name, one in METHODS.items() if (one.records, one.plain_texts) == (records, plain_texts))
    return " or ".join(fitting)


SECTIONS = tuple(dict.fromkeys(method.section for method in METHODS.values() if method.section is not None))
