"""Where PPO's scores come from, as one function of written answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.errors import Fault, InputError
from surefoot.models.rollout import Rollout
from surefoot.stages.stage import RewardFunction

Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Scores:
    """score: None where the cast has a reward model. identity: by which a resumed run knows it again."""

    score: Score | None
    identity: str


def make_scores(config: RunConfig, function: RewardFunction | None, tokenizer: PreTrainedTokenizerBase) -> Scores:
    """function: a Python caller's. Raises InputError where nothing or too much is named."""
    if function is None:
        raise InputError(Fault("ppo.reward", "no score is named", "name one, or pass reward= from Python"))

    def score(answers: Sequence[Rollout]) -> Sequence[float]:
        prompts = [_text(tokenizer, one.prompt) for one in answers]
        responses = [_text(tokenizer, one.response) for one in answers]
        return checked(function(prompts, responses), len(answers))

    return Scores(score, f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}")


def checked(found: Sequence[float], count: int) -> list[float]:
    """As numbers. Raises InputError for another number of them than of answers."""
    numbers = [float(one) for one in found]
    if len(numbers) != count:
        what = f"returned {len(numbers)} scores for {count} answers"
        raise InputError(Fault("ppo.reward", what, "return one number for each response"))
    return numbers


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text
