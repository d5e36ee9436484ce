"""Where PPO's scores come from: a reward model, a function of the user's own, or a server.

A scorer takes two lists of the same length, prompts and responses as texts, and returns a number for each pair. Higher
is better. It may return NaN or infinity: PPO counts those answers as left out. A function is code that the user names
and this process runs, with all its rights; nothing else is ever executed because a config names it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.methods.method import RewardFunction
from surefoot.models.folder import resolve_folder
from surefoot.models.rollout import Rollout
from surefoot.models.value_head import value_head_tensors
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.nearest import nearest_word
from surefoot.system.posting import server

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


Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def is_function(text: str) -> bool:
    """Whether it reads FILE.py:FUNCTION."""
    return ".py:" in text and not is_address(text)


def open_scorer(text: str, key: str = "ppo.reward") -> Scorer | None:
    """The scorer that `text` names; None for anything else, which is a reward model's folder or hub id. key: named in
    faults. Raises InputError for a file or function that is not there, or an address that is none."""
    if is_address(text):
        return _at_address(text, key)
    if is_function(text):
        file, _, name = text.rpartition(":")
        return checked(function_in(Path(file), name, key), text)
    return None


def function_in(file: Path, name: str, key: str) -> Callable[..., Any]:
    """Runs the file, as an import would, and returns its function. Raises InputError."""
    if not file.is_file():
        raise InputError(
            Fault(key, f"there is no file {file}", "it is relative to the working folder", code="SF-FILE-MISSING")
        )
    module = _module(file)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            one
            for one, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == module.__name__ and one[0] != "_"
        ]
        near = nearest_word(name, own)
        has = f"it has {', '.join(own)}" if own else "it has no function"
        what = f"{file} has no function {name!r}" if found is None else f"{name!r} in {file} is no function"
        raise InputError(Fault(key, what, f"did you mean {near}?" if near else has, code="SF-OWN-FUNCTION"))
    return found


def checked(scorer: Callable[..., Any], name: str) -> Scorer:
    """The same, with whatever it does wrong as one line. name: what the user calls it. Raises InputError where it
    raises, or returns something other than one number for each answer."""

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        try:
            found = scorer(list(prompts), list(responses))
        except SurefootError:
            raise
        except Exception as error:
            raise InputError(
                Fault(_place(error, name), f"the reward raised {_said(error)}", code="SF-OWN-FUNCTION")
            ) from error
        return _one_each(found, len(responses), name)

    return score


def _at_address(text: str, key: str) -> Scorer:
    asked = server(text, key)

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        said = asked.post("", {"prompts": list(prompts), "responses": list(responses)})
        if not isinstance(said, dict) or "scores" not in said:
            what = 'answers without {"scores": […]}'
            raise InputError(Fault(asked.address, what, "see docs/ppo.md for what a scorer returns", code="SF-SERVER"))
        scores = _one_each(said["scores"], len(responses), asked.address)
        if not all(map(math.isfinite, scores)):
            raise InputError(
                Fault(asked.address, "answers with a score that is NaN or infinite", "see its log", code="SF-SERVER")
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


def _module(file: Path) -> ModuleType:
    """The file as a module of its own, with its folder to import from, as when it is run."""
    name = f"surefoot_scorer_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their module
    folder = os.fspath(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            Fault(_place(error, str(file)), f"cannot be imported: {_said(error)}", code="SF-OWN-FUNCTION")
        ) from error
    return module


def _place(error: BaseException, name: str) -> str:
    """FILE:LINE of the user's code that the error came from or through: the last line that is no library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    file = name.rpartition(":")[0] if is_function(name) else name
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(Path(file).name)]
    return f"{file}:{frames[-1].lineno}" if frames else name


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:240]
