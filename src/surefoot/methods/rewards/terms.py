"""The rewards of a run, named by the config. Every reward scores every answer; their weighted sum is the score.

    grpo:
      rewards: [numeric, {name: style.py:short, weight: 0.1}, {name: "http://127.0.0.1:9000", weight: 0.5}]

A user's function is called with two lists, prompts and responses, and with those of these keyword arguments that it
declares: `response_ids`, `records`, with an environment `turns`, and any field of the records by its name, each a list
of the same length. It returns for each answer a number, {"score": number, "reason": text}, or None for no score. A
server gets the same as JSON. Reward models have scored the answers before (`Answers.by_models`). A function that raises
is called again for each answer separately: answers for which it raises have no score and are counted; if it raises for
all, the run ends.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os.path
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from surefoot.config.methods import RewardTerm
from surefoot.data.formats.conversation import listed
from surefoot.methods.own_functions import identity, name_of, one_line, own_function, passed_name, place_in
from surefoot.methods.reward_source import head_digest, trained_folder, weights_fingerprint
from surefoot.methods.rewards.answers import LOST, Answers, Grade, Outcome, Score, scored
from surefoot.methods.rewards.graders import GRADERS, IN_CHILDREN, grader
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_address, is_function
from surefoot.system.messages import counted
from surefoot.system.posting import Server, server

_AT_ONCE = 16  # requests to a server
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NO_REWARDS = ("std", "overlong", "environment")  # names in the log as reward_… that are not rewards


@dataclass(frozen=True)
class Reward:
    """One reward of a run.

    label: its unique name in logs.
    identity: compared when a run is resumed.
    at_once: groups that are scored at the same time while a server draws others; 0: all answers together, afterwards.
    servers: that are asked.
    """

    label: str
    weight: float
    grade: Grade
    identity: str
    at_once: int = 0
    servers: tuple[Server, ...] = ()


@dataclass(frozen=True)
class Graded:
    """One answer's scores.

    total: the weighted sum; NaN if a reward failed, or if none gave a score.
    parts: by the rewards' labels.
    """

    total: float
    parts: Mapping[str, Score]

    @property
    def outcome(self) -> Outcome:
        """Outcome of the answer: that of its first failed reward."""
        for one in self.parts.values():
            if one.outcome in LOST:
                return one.outcome
        return "scored" if math.isfinite(self.total) else "not_asked"


def open_rewards(terms: Sequence[RewardTerm]) -> tuple[Reward, ...]:
    """Make the rewards. Raises InputError for an unknown name, a missing function, or a wrong address."""
    found: list[Reward] = []
    for place, term in enumerate(terms):
        opened = _open(term, f"grpo.rewards[{place}].name")
        label = _label(term)
        taken = [*_NO_REWARDS, *(one.label for one in found)]
        if label in taken:
            label = f"{label}_{sum(name.startswith(label) for name in taken) + 1}"
        asked = {name: value for name, value in term.model_dump().items() if name != "name" and value is not None}
        found.append(replace(opened, label=label, identity=f"{opened.identity} {sorted(asked.items())}"))
    return tuple(found)


def passed_reward(function: Callable[..., Any]) -> Reward:
    """A Python caller's."""
    name = passed_name(function)
    return Reward(name.rpartition(".")[2], 1.0, of_function(function, name), name)


def grade_all(
    rewards: Sequence[Reward],
    answers: Answers,
    asking: Callable[[str], AbstractContextManager[None]] = lambda label: nullcontext(),
    given: Mapping[str, Sequence[Score]] = {},  # read only
) -> list[Graded]:
    """Return each answer's scores, in order.

    asking: context manager for each reward, by its label.
    given: scores of rewards that were asked before, by their labels.
    """
    parts = dict(given)
    for reward in (one for one in rewards if one.label not in given):
        with asking(reward.label):
            parts[reward.label] = reward.grade(answers) if len(answers) else ()
    weights = {reward.label: reward.weight for reward in rewards}
    found = []
    for place in range(len(answers)):
        own = {label: scores[place] for label, scores in parts.items()}
        known = [weights[label] * one.value for label, one in own.items() if one.outcome == "scored"]
        lost = any(one.outcome in LOST for one in own.values())
        found.append(Graded(math.nan if lost or not known else math.fsum(known), own))
    return found


def _open(term: RewardTerm, key: str) -> Reward:
    """Without its label."""
    name, made = term.name, partial(Reward, "", term.weight)
    if name in GRADERS:
        return made(grader(term, key), name, at_once=int(name in IN_CHILDREN))
    if is_address(name):
        asked = server(name, key)
        return made(_at_address(asked), name, at_once=_AT_ONCE, servers=(asked,))
    if is_function(name) or name.startswith("entry_point:"):
        own = own_function(name, key)
        _require_convention(own, name, key, term.convention)
        return made(of_function(own, name, term.convention), identity(name))
    if term.is_model:
        head = head_digest(trained_folder(name))
        grade: Grade = lambda answers: [_of_model(score) for score in answers.by_models[name]]  # noqa: E731
        return made(grade, f"{weights_fingerprint(name)} {head}")
    what = f"{name!r} is not a reward"
    fix = f"name {listed(GRADERS)}, FILE.py:FUNCTION, an http address, or a reward model (a folder as ./reward)"
    raise InputError(Fault(key, what, fix, code="SF-REWARD"))


def _require_convention(function: Callable[..., Any], name: str, key: str, convention: str | None) -> None:
    """Raise InputError for a function that cannot be called with prompts and responses. One of TRL's, as
    f(completions, answer, **fields), could be, and would take the prompts for completions."""
    if convention == "trl":
        return
    declared, rest = _declared(function), _declared(function, 2)
    if any(one.name == "completions" for one in declared):
        what, fix = "takes completions, as functions for TRL do", "write convention: trl beside its name"
    elif any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in declared) or len(declared) - len(rest) in (0, 2):
        return  # nothing is known of the parameters of a builtin
    else:
        what, fix = f"takes {declared[0].name} alone", "let it take prompts and responses first"
    raise InputError(Fault(key, f"{name} {what}", fix, code="SF-OWN-FUNCTION"))


def _of_model(score: float | None) -> Score:
    return Score(math.nan, "", "not_asked") if score is None else scored(score)


def _label(term: RewardTerm) -> str:
    name = term.name
    if is_address(name):
        return "server"
    if term.is_model:
        return os.path.basename(os.path.normpath(name))
    return name_of(name) if ":" in name else name


def of_function(function: Callable[..., Any], name: str, convention: str | None = None) -> Grade:
    """Make a grader from a user's function. name: the user's name for it. convention: as in RewardTerm."""

    def ask(answers: Answers) -> list[Score]:
        if convention == "trl":
            found = function(**_named(function, _as_trl(answers)))
        else:
            found = function(list(answers.prompts), list(answers.responses), **_keywords(function, answers))
        return _one_each(found, len(answers), name)

    def grade(answers: Answers) -> list[Score]:
        try:
            return ask(answers)
        except SurefootError:
            raise
        except Exception as error:
            fault = InputError(
                Fault(place_in(error, name), f"the reward raised {one_line(error)}", code="SF-OWN-FUNCTION")
            )
            fault.__cause__ = error
        found = [_asked_alone(ask, answers.one(place)) for place in range(len(answers))]
        if all(one.outcome == "raised" for one in found):
            raise fault
        return found

    return grade


def _asked_alone(ask: Callable[[Answers], list[Score]], answer: Answers) -> Score:
    try:
        return ask(answer)[0]
    except SurefootError:
        raise
    except TimeoutError as error:
        return Score(math.nan, one_line(error), "timed_out")
    except Exception as error:
        return Score(math.nan, one_line(error), "raised")


def _keywords(function: Callable[..., Any], answers: Answers) -> dict[str, Any]:
    """Return the keyword arguments of surefoot's convention."""
    offered = _fields(answers)
    offered |= {"response_ids": [list(ids) for ids in answers.response_ids], "records": list(answers.records)}
    offered |= {"turns": [list(one) for one in answers.turns]} if answers.turns else {}
    return _named(function, {name: one for name, one in offered.items() if name not in ("prompts", "responses")}, 2)


def _as_trl(answers: Answers) -> dict[str, Any]:
    """Return the arguments of TRL's convention: prompts as in the records, completions of conversations as lists of one
    message."""
    prompts = [record.get("prompt", text) for record, text in zip(answers.records, answers.prompts, strict=True)]
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(prompts, answers.responses, strict=True)
    ]
    ids = [list(one) for one in answers.response_ids]
    own = {name: one for name, one in _fields(answers).items() if name not in ("prompt", "completion")}
    return own | {"prompts": prompts, "completions": completions, "completion_ids": ids}


def _fields(answers: Answers) -> dict[str, Any]:
    """Return the fields of the records, each as a list over the answers."""
    names = dict.fromkeys(name for record in answers.records for name in record)
    return {name: [record.get(name) for record in answers.records] for name in names}


def _named(function: Callable[..., Any], offered: dict[str, Any], positional: int = 0) -> dict[str, Any]:
    """Return the arguments that the function declares, or all if it takes any.

    positional: number of its parameters that are passed by position.
    """
    declared = _declared(function, positional)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in declared):
        return offered
    return {one.name: offered[one.name] for one in declared if one.name in offered}


def _declared(function: Callable[..., Any], positional: int = 0) -> list[inspect.Parameter]:
    """The function's parameters without the first `positional` ones."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin or extension function
        return []
    by_place = [one for one in parameters if one.kind in _BY_PLACE][:positional]
    return [one for one in parameters if one not in by_place]


def needed_fields(term: RewardTerm, turns: bool) -> list[str]:
    """Return the fields of the records without which a user's function cannot be called.

    turns: whether answers have turns with an environment.
    """
    name = term.name
    if not (is_function(name) or name.startswith("entry_point:")):
        return []
    trl = term.convention == "trl"
    given = ("prompts", "completions", "completion_ids") if trl else ("response_ids", "records")
    declared = _declared(own_function(name, "grpo.rewards"), 0 if trl else 2)
    needed = [one.name for one in declared if one.default is inspect.Parameter.empty and one.kind in _BY_NAME]
    return [field for field in needed if field not in given and not (turns and field == "turns")]


def _at_address(asked: Server) -> Grade:
    def grade(answers: Answers) -> list[Score]:
        body = {
            "prompts": list(answers.prompts),
            "responses": list(answers.responses),
            "records": [dict(record) for record in answers.records],
        }
        said = asked.post("", body)
        if not isinstance(said, dict) or "scores" not in said:
            what = 'did not return {"scores": […]}'
            raise InputError(Fault(asked.address, what, "see docs/grpo.md", code="SF-SERVER"))
        return _one_each(said["scores"], len(answers), asked.address)

    return grade


def _one_each(found: Any, count: int, name: str) -> list[Score]:
    """Convert the returned value to scores. Raises InputError unless there is one for each answer."""
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != count:
        got = counted(len(values), "score") if isinstance(values, list | tuple) else type(found).__name__
        what = f"the reward returned {got} for {count} answers"
        raise InputError(Fault(name, what, "return a number for each answer", code="SF-OWN-FUNCTION"))
    return [_score(value, place, name) for place, value in enumerate(values)]


def _score(value: Any, place: int, name: str) -> Score:
    if value is None:
        return Score(math.nan, "", "not_asked")
    named = isinstance(value, dict) and "score" in value
    given: Any = value["score"] if named else value
    number: Any = given.item() if hasattr(given, "item") else given  # of a tensor or array of one number
    if not isinstance(number, numbers.Real):
        what = f"the reward returned {type(number).__name__} for answer {place}"
        raise InputError(Fault(name, what, "return a number for each answer", code="SF-OWN-FUNCTION"))
    return scored(float(number), str(value.get("reason", "")) if named else "")
