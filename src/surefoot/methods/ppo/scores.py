"""Where PPO's scores come from, as one function of written answers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.methods.method import RewardFunction
from surefoot.methods.ppo.scorers import Scorer, checked, is_address, is_function, open_scorer
from surefoot.models.folder import resolve_folder
from surefoot.models.rollout import Rollout
from surefoot.models.value_head import value_head_tensors
from surefoot.system import durable

Score = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class Scores:
    """score: None where the cast has a reward model. identity: by which a resumed run knows it again."""

    score: Score | None
    identity: str


def reward_model(config: RunConfig) -> str | None:
    """The reward model that the config names; None where scores come from a function or a server."""
    named = config.ppo.reward
    return None if named is None or is_function(named) or is_address(named) else named


def make_scores(config: RunConfig, function: RewardFunction | None, tokenizer: PreTrainedTokenizerBase) -> Scores:
    """function: a Python caller's; of others the config says where they are. Raises InputError for a function or
    address that is none."""
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
    """Of a function or a server. Raises InputError where there is none."""
    return _scorer(named, _identity(named))


@functools.lru_cache(maxsize=1)  # a file of the user's may load what it likes: once
def _scorer(named: str, identity: str) -> Scorer:
    found = open_scorer(named)
    assert found is not None, "no reward model"
    return found


def _identity(named: str) -> str:
    file = Path(named.rpartition(":")[0])
    return f"{named} {durable.sha256_file(file)}" if is_function(named) and file.is_file() else named


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
