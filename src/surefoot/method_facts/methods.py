"""The training methods as facts: the data, the models, the config keys and the fast paths of each word of `stage`.

    METHODS["dpo"].records              # "pairs"
    config.method.packs                 # the same row, of a run's config

No module outside `surefoot.methods` compares a method's name: it asks the row. What a method computes is one row of
functions in `surefoot.methods.table`; neither exists without the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from surefoot.method_facts.losses import GROUP_LOSSES, PAIR_LOSSES, REWARD_LOSSES, LossFacts, keys_of

Records = Literal["answers", "pairs", "judged", "prompts"]
Unit = Literal["tokens", "pairs", "answers", "response_tokens"]
"""What a batch's weight counts, and a loss is the mean over: tokens that are learned, pairs of answers, answers, or
tokens of the policy's own responses."""

COUNTED: Mapping[Records, str] = MappingProxyType(
    {"answers": "examples", "pairs": "pairs", "judged": "answers", "prompts": "prompts"}
)
"""What users count, by what a record becomes: batch.size, held-out records and audits are in these."""

FORMATS: Mapping[str, Records] = MappingProxyType(
    {
        "alpaca": "answers",
        "sharegpt": "answers",
        "messages": "answers",
        "prompt-completion": "answers",
        "text": "answers",
        "commonsense": "answers",
        "preference": "pairs",
        "judged": "judged",
        "prompts": "prompts",
    }
)
"""What data.format may name, and what its records become. `surefoot.data.formats.registry` reads each."""


def formats_for(records: Records) -> tuple[str, ...]:
    """The formats whose records become this."""
    return tuple(name for name, become in FORMATS.items() if become == records)


@dataclass(frozen=True)
class MethodFacts:
    """One training method.

    title: in prose, as the model card names it.
    records: what a record of its data becomes, see `surefoot.data.sources.records`.
    formats: what data.format may name beside auto and custom; None: any.
    unit: what its loss is a mean over.
    rows: rows of a batch that one example becomes.
    counts: what batch.size counts, where that is not the records.
    section: of the config, that the method reads; None: it has no section of its own.
    own_keys: keys of that section which no other method reads.
    losses: by the name that the section's key `loss` may have; empty where the method has one loss.
    metrics: of every evaluation, better the higher they are; checkpoint.best may name them.
    pictures: its records may have pictures.
    learns_tokens: it learns the marked tokens of each example by cross entropy, so data.train_on, data.encoding and
        NEFTune apply. The others compare whole answers.
    plain_texts: examples are texts without turns, cut into as many pieces as they need.
    compared: what dropout masks would add noise to; empty where masks do no harm.
    reference: its loss may be held to a reference policy, so alignment.reference applies.
    other_prompts: each step also pairs its prompts with each other's answers, so a step needs two examples and their
        log-probabilities cannot be computed once for all.
    scores: it trains a value head, and computes no logits and writes no answers.
    rollouts: it answers prompts while it trains, and learns from its own answers.
    critic: it trains a critic beside the policy, and may have a reward model.
    weighs_answers: the loss needs the log-probability of every answer by itself before it is known how much each
        counts, so a head that trains cannot go over positions a few at a time.
    packs: the documents of a step can go through the model as one packed row.
    shares_prompts: what both answers of a pair begin with can go through the model once.
    one_pass: a step is one forward and one backward pass over its rows and nothing else, so its FLOPs are known.
    proposed: `surefoot init` takes it for records of this kind, where nobody names a method.
    first_rate: learning rate of an adapter that `surefoot init` proposes; None: it proposes no such run.
    large_rate: usual learning rate of all weights of a model of some 8 B parameters; None: nobody says.
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
    critic: bool = False
    weighs_answers: bool = False
    packs: bool = True
    shares_prompts: bool = False
    one_pass: bool = False
    proposed: bool = False
    first_rate: float | None = None
    large_rate: float | None = None

    @property
    def counted(self) -> str:
        """What batch.size counts."""
        return self.counts or COUNTED[self.records]


_RANKED = ("reward_accuracy", "reward_margin")

METHODS: Mapping[str, MethodFacts] = MappingProxyType(
    {
        "pretrain": MethodFacts(
            title="continued pretraining",
            records="answers",
            formats=("text",),
            learns_tokens=True,
            plain_texts=True,
            one_pass=True,
            first_rate=5e-5,
        ),
        "sft": MethodFacts(
            title="supervised fine-tuning",
            records="answers",
            formats=(*formats_for("answers"), *formats_for("pairs")),  # of a pair it learns the better answer
            pictures=True,
            learns_tokens=True,
            one_pass=True,
            proposed=True,
            first_rate=2e-4,
            large_rate=2e-5,
        ),
        "reward": MethodFacts(
            title="reward modelling on pairs of answers",
            records="pairs",
            formats=formats_for("pairs"),
            unit="pairs",
            rows=2,
            section="reward",
            losses=REWARD_LOSSES,
            metrics=_RANKED,
            compared="scores of two answers are compared",
            scores=True,
            shares_prompts=True,
            one_pass=True,
            first_rate=1e-4,
            large_rate=5e-6,
        ),
        "dpo": MethodFacts(
            title="direct preference optimisation",
            records="pairs",
            formats=formats_for("pairs"),
            unit="pairs",
            rows=2,
            section="alignment",
            own_keys=("loss", *keys_of(PAIR_LOSSES), "sft"),
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
            title="Kahneman-Tversky optimisation",
            records="judged",
            formats=formats_for("judged"),
            unit="answers",
            rows=2,
            section="alignment",
            own_keys=("good", "bad"),
            metrics=_RANKED,
            compared="log-probabilities of two models are compared",
            reference=True,
            other_prompts=True,
            weighs_answers=True,
            proposed=True,
            first_rate=5e-6,
        ),
        "ppo": MethodFacts(
            title="proximal policy optimisation",
            records="prompts",
            formats=None,
            unit="response_tokens",
            section="ppo",
            metrics=("reward", "ended"),
            compared="log-probabilities before and after an update are compared",
            rollouts=True,
            critic=True,
            packs=False,
            large_rate=5e-7,
        ),
        "grpo": MethodFacts(
            title="group relative policy optimisation",
            records="prompts",
            formats=None,
            unit="response_tokens",
            counts="answers",
            section="grpo",
            losses=GROUP_LOSSES,
            metrics=("reward", "ended"),
            compared="log-probabilities before and after an update are compared",
            reference=True,
            rollouts=True,
            packs=False,
            large_rate=1e-6,
        ),
    }
)


def methods_of(section: str) -> tuple[str, ...]:
    """The methods that read a section of the config."""
    return tuple(name for name, method in METHODS.items() if method.section == section)


def methods_for(records: Records, *, plain_texts: bool = False) -> str:
    """The methods that learn from such records, for a message: "reward or dpo".

    records: what the records become.
    plain_texts: of answers, texts without turns.
    """
    fitting = (name for name, one in METHODS.items() if (one.records, one.plain_texts) == (records, plain_texts))
    return " or ".join(fitting)


SECTIONS = tuple(dict.fromkeys(method.section for method in METHODS.values() if method.section is not None))
