"""Where PPO's scores come from: a reward model, a function of the user's own, or a server.

A scorer takes two lists of the same length, prompts and responses as texts, and returns a number for each pair. Higher
is better. It may return NaN or infinity: PPO counts those answers as left out. A function is code that the user names
and this process runs, with all its rights; nothing else is ever executed because a config names it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.methods.method import RewardFunction
from surefoot.methods.own_functions import identity, name_of, one_line, own_function, place_in
from surefoot.models.folder import resolve_folder
from surefoot.models.rollout import Rollout
from surefoot.models.value_head import value_head_tensors
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_address, is_function
from surefoot.system.posting import server

_KEY = "ppo.reward"  # of the config, for faults
Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Scores:
    """Where a run's scores come from.

    score: None where the models have a reward model.
    identity: by which a resumed run knows it again.
    """

    score: Score | None
    identity: str


def reward_model(config: RunConfig) -> str | None:
    """The reward model that the config names; None where scores come from a function or a server."""
    named = config.ppo.reward
    return None if named is None or is_function(named) or is_address(named) else named


def make_scores(config: RunConfig, function: RewardFunction | None, tokenizer: PreTrainedTokenizerBase) -> Scores:
    """The scorer of a run.

    function: a Python caller's; of others the config says where they are.

    Raises InputError for a function or address that is none.
    """
    named = config.ppo.reward
    if function is not None:
        kind = type(function)  # of a callable object, which has no name of its own
        name = f"{function.__module__}.{getattr(function, '__qualname__', kind.__qualname__)}"
        return Scores(_of_texts(checked(function, name), tokenizer), name)
    assert named is not None, "checked before"
    if reward_model(config) is not None:
        return Scores(None, _identity_of_model(resolve_folder(named, None, weights=True)))
    return Scores(_of_texts(named_scorer(named), tokenizer), _identity(named))


def named_scorer(named: str) -> Scorer:
    """Of a function or a server. Raises InputError for a file or function that is not there, or an address that is
    none."""
    return _opened(named, _identity(named))


@functools.lru_cache(maxsize=1)  # a server is asked what it is once; a file that was edited is read again
def _opened(named: str, identity: str) -> Scorer:
    return _at_address(named) if is_address(named) else checked(own_function(named, _KEY), named)


def _identity(named: str) -> str:
    return f"{named} {identity(named).removeprefix(f'{name_of(named)} ')}" if is_function(named) else named


def _of_texts(scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> Score:
    """Prompts and answers as people read them, without control tokens."""

    def score(answers: Sequence[Rollout]) -> Sequence[float]:
        if not answers:
            return []
        prompts = [_text(tokenizer, one.prompt) for one in answers]
        return scorer(prompts, [_text(tokenizer, one.response) for one in answers])

    return score


def _identity_of_model(folder: Path) -> str:
    """Of its value head: every training changes it."""
    tensors = sorted(value_head_tensors(folder).items())
    return hashlib.sha256(b"".join(tensor.float().numpy().tobytes() for _, tensor in tensors)).hexdigest()


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def checked(scorer: Callable[..., Any], name: str) -> Scorer:
    """The same, with whatever it does wrong as one line.

    name: what the user calls it.

    Raises InputError where it raises, or returns something other than one number for each answer.
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


def _at_address(text: str) -> Scorer:
    scorer = server(text, _KEY)

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        said = scorer.post("", {"prompts": list(prompts), "responses": list(responses)})
        if not isinstance(said, dict) or "scores" not in said:
            what = 'answers without {"scores": […]}'
            raise InputError(Fault(scorer.address, what, "see docs/ppo.md for what a scorer returns", code="SF-SERVER"))
        scores = _one_each(said["scores"], len(responses), scorer.address)
        if not all(map(math.isfinite, scores)):
            raise InputError(
                Fault(scorer.address, "answers with a score that is NaN or infinite", "see its log", code="SF-SERVER")
            )
        return scores

    return score


def _one_each(found: Any, count: int, name: str) -> list[float]:
    """What was returned, as floats. Tensors and arrays of one dimension are taken as well."""
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
    """A tensor or array of one number."""
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0
