"""The source of PPO's scores: a reward model, a user's function, or a server.

A scorer takes two lists of equal length, prompts and responses as texts, and returns a number per pair; higher is
better. NaN or infinity is allowed: PPO leaves such answers out. A function is code that the user names; it runs in this
process with all its rights, and nothing else in a config is ever executed.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.methods.method import RewardFunction
from surefoot.methods.own_functions import identity, name_of, one_line, own_function, passed_name, place_in
from surefoot.methods.reward_source import head_digest
from surefoot.models.folder import resolve_folder
from surefoot.models.rollout import Rollout
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_address, is_function
from surefoot.system.posting import Server, server

_KEY = "ppo.reward"  # config key, for faults
Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Scores:
    """A run's scorer.

    score: None if the models include a reward model.
    identity: how a resumed run recognizes it.
    servers: that are asked.
    """

    score: Score | None
    identity: str
    servers: tuple[Server, ...] = ()


def reward_model(config: RunConfig) -> str | None:
    """The reward model named in the config; None if scores come from a function or a server."""
    named = config.ppo.reward
    return None if named is None or is_function(named) or is_address(named) else named


def make_scores(config: RunConfig, function: RewardFunction | None, tokenizer: PreTrainedTokenizerBase) -> Scores:
    """Make the scorer of a run.

    function: a Python caller's function; None: the config names the scorer.

    Raises InputError for an invalid function or address.
    """
    named = config.ppo.reward
    if function is not None:
        name = passed_name(function)
        return Scores(_of_texts(checked(function, name), tokenizer), name)
    assert named is not None, "checked before"
    if reward_model(config) is not None:
        return Scores(None, head_digest(resolve_folder(named, None, weights=True)))
    if is_address(named):
        asked = server(named, _KEY)  # of this run alone: its requests may be given up
        return Scores(_of_texts(_at_address(asked), tokenizer), named, (asked,))
    return Scores(_of_texts(named_scorer(named), tokenizer), _identity(named))


def named_scorer(named: str) -> Scorer:
    """Open a function or server as a scorer. Raises InputError if it does not exist or is invalid."""
    return _opened(named, _identity(named))


@functools.lru_cache(maxsize=1)  # a server is identified once; an edited file is loaded again
def _opened(named: str, identity: str) -> Scorer:
    return _at_address(server(named, _KEY)) if is_address(named) else checked(own_function(named, _KEY), named)


def _identity(named: str) -> str:
    return f"{named} {identity(named).removeprefix(f'{name_of(named)} ')}" if is_function(named) else named


def _of_texts(scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Decode prompts and answers without control tokens for the scorer."""

    def score(answers: Sequence[Rollout]) -> Sequence[float]:
        if not answers:
            return []
        prompts = [_text(tokenizer, one.prompt) for one in answers]
        return scorer(prompts, [_text(tokenizer, one.response) for one in answers])

    return score


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def checked(scorer: Callable[..., Any], name: str) -> Scorer:
    """Wrap a scorer so that its errors become one line.

    name: the user's name for it.

    Raises InputError if it raises, or does not return one number per answer.
    """

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        try:
            found = scorer(list(prompts), list(responses))
        except SurefootError:
            raise
        except Exception as error:
            raise InputError(
                Fault(place_in(error, name), f"the reward raised {one_line(error)}", code="SF-OWN-FUNCTION")
            ) from error
        return _one_each(found, len(responses), name)

    return score


def _at_address(scorer: Server) -> Scorer:
    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        reply = scorer.post("", {"prompts": list(prompts), "responses": list(responses)})
        if not isinstance(reply, dict) or "scores" not in reply:
            what = 'answers without {"scores": […]}'
            raise InputError(Fault(scorer.address, what, "see docs/ppo.md for what a scorer returns", code="SF-SERVER"))
        scores = _one_each(reply["scores"], len(responses), scorer.address)
        if not all(map(math.isfinite, scores)):
            raise InputError(
                Fault(scorer.address, "answers with a score that is NaN or infinite", "see its log", code="SF-SERVER")
            )
        return scores

    return score


def _one_each(found: Any, count: int, name: str) -> list[float]:
    """Convert the result to floats. One-dimensional tensors and arrays are allowed."""
    if isinstance(found, str | bytes | dict) or not isinstance(found, Iterable):
        raise InputError(
            Fault(
                name,
                f"the reward returned {type(found).__name__}",
                "return a number for each answer",
                code="SF-OWN-FUNCTION",
            )
        )
    values = found.tolist() if hasattr(found, "tolist") else list(found)  # pyright: ignore[reportAttributeAccessIssue]
    if len(values) != count:
        what = f"the reward returned {len(values)} scores for {count} answers"
        raise InputError(Fault(name, what, "return a number for each answer", code="SF-OWN-FUNCTION"))
    for place, value in enumerate(values):
        if isinstance(value, bool) or not (isinstance(value, numbers.Real) or _is_scalar(value)):
            what = f"the reward returned {type(value).__name__} for answer {place}"
            raise InputError(Fault(name, what, "return a number for each answer", code="SF-OWN-FUNCTION"))
    return [float(value) for value in values]


def _is_scalar(value: Any) -> bool:
    """Whether the value is a 0-dimensional tensor or array."""
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0
