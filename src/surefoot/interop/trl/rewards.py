"""Translate the rewards of `trl grpo` and `trl rloo`: TRL's own, functions by dotted path, reward models by folder.

A function is read from its file and never imported. What TRL calls it with and surefoot cannot give is refused here,
not after the model is loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from surefoot.config.methods import RewardTerm
from surefoot.interop.backward import Ours
from surefoot.interop.draft import Draft
from surefoot.interop.settings import Refusal
from surefoot.system.errors import InputError

SOFT_OVERLONG, _LIMIT, _BUFFER = "get_soft_overlong_punishment", 1280, 256  # as TRL's scripts call it
_MATH = "math-verify there reads the first LaTeX answer, here the last formula; a wrong key is refused before step 1"
# TRL's name -> (reward, how it differs).
Rewards = Mapping[str, tuple[dict[str, Any], str]]
OWN: Rewards = {
    "think_format_reward": ({"name": "regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>"}, ""),
    "accuracy_reward": ({"name": "math", "field": "solution"}, _MATH),
    "reasoning_accuracy_reward": (
        {"name": "math", "field": "solution", "pattern": r"(?s)(?:.*</think>)(.*)"},
        _MATH,
    ),
}
_CALLED_WITH = ("prompts", "completions", "completion_ids")
_ONLY_THERE = ("trainer_state", "environments", "log_extra", "log_metric")  # also passed by TRL, but not by surefoot


def set_rewards(draft: Draft, functions: str, weights: str, model: str | None, limit: str, own: Rewards = OWN) -> None:
    """Set grpo.rewards, and grpo.overlong for TRL's penalty of long answers.

    functions, weights, model, limit: names of the settings with the functions, their weights, a reward model (None: the
    functions may name one), and the maximum length of an answer.
    """
    asked = [draft[model]] if model is not None and draft[model] else []
    named = draft[functions]
    asked += named if isinstance(named, list) else [named] if named else []
    if not asked:
        draft.refuse(functions, "no reward is named", "name functions or a reward model")
        return
    shares = draft[weights]
    shares = [1.0] * len(asked) if shares is None else shares if isinstance(shares, list) else [shares]
    if len(shares) != len(asked) or not all(isinstance(one, int | float) for one in shares):
        draft.refuse(weights, f"expected {len(asked)} numbers, one per reward")
        return
    terms: list[dict[str, Any]] = []
    reasons: list[str] = []
    for number, (name, share) in enumerate(zip(asked, shares, strict=True)):
        from_model = model is not None and bool(draft[model]) and number == 0
        try:
            if name == SOFT_OVERLONG:
                _set_overlong(draft, functions, share, draft[limit])
                continue
            term, why = _model(str(name)) if from_model else _term(draft, str(name), own, models=model is None)
        except Refusal as refusal:
            draft.refuse(model if from_model and model else functions, refusal.what, refusal.fix)
            continue
        terms.append(term if share == 1 else {**term, "weight": float(share)})
        reasons += [why] if why else []
    words = (functions, *([model] if model is not None else []))
    draft.set("grpo.rewards", terms, *words, weights, why="; ".join(dict.fromkeys(reasons)))


def written(ours: Ours, *, models: bool) -> list[str] | None:
    """Return TRL's names of the rewards that it has, None for none. models: also of those that are models."""
    terms = [term for term in ours["grpo.rewards"] if models or not _is_model(term)]
    found = [name for term in terms if (name := _name(term))]
    return found + ([SOFT_OVERLONG] if ours["grpo.overlong"] == "penalise" else []) or None


def written_model(ours: Ours) -> str | None:
    """Return the reward model that comes first, as TRL has one before all functions."""
    first = next(iter(ours["grpo.rewards"]), None)
    return _name(first) if first is not None and _is_model(first) else None


def written_weights(ours: Ours) -> list[float] | None:
    shares = [term["weight"] for term in ours["grpo.rewards"] if _name(term)]
    return None if all(share == 1 for share in shares) else shares


def _is_model(term: Mapping[str, Any]) -> bool:
    return RewardTerm.model_validate(term).is_model


def _name(term: Mapping[str, Any]) -> str | None:
    said = {key: value for key, value in term.items() if value is not None and key != "weight"}
    path, _, function = said["name"].rpartition(":")
    if said.get("convention") == "trl":
        return f"{path.removesuffix('.py').replace('/', '.')}.{function}"
    own = next((name for name, (mine, _) in OWN.items() if mine == said), None)
    return said["name"].removeprefix("./") if _is_model(said) else own


def _set_overlong(draft: Draft, functions: str, share: float, limit: Any) -> None:
    if limit != _LIMIT or share != 1:
        what = f"{SOFT_OVERLONG} is for answers of up to {_LIMIT} tokens with weight 1; here {limit} and {share:g}"
        raise Refusal(what, "leave it out, and set grpo.overlong: penalise in surefoot's config")
    draft.set("grpo.overlong", "penalise", functions)
    draft.set("grpo.overlong_buffer", _BUFFER, functions)


def _model(name: str) -> tuple[dict[str, Any], str]:
    why = "a reward model reads the ids as they were drawn; TRL tokenizes the text again"
    return {"name": name if "/" in name else f"./{name}"}, why


def _term(draft: Draft, name: str, own: Rewards, *, models: bool) -> tuple[dict[str, Any], str]:
    """Return the reward, and how it differs from TRL's. models: whether a name may be a reward model's."""
    if name in own:
        return own[name]
    if models and "/" in name:
        return _model(name)
    file, _, function = name.rpartition(":")  # of a script that was taken over
    module, _, function = (file, "", function) if file else name.rpartition(".")
    if not module:
        raise Refusal(
            f"surefoot knows no reward {name} of {draft.dialect.tool}",
            f"use one of {', '.join([*own, SOFT_OVERLONG])}, or MODULE.FUNCTION",
        )
    path = file or f"{module.replace('.', '/')}.py"
    try:
        text = draft.options.read(path)
    except InputError:  # of an installed package
        return {"name": f"{module}:{function}", "convention": "trl"}, ""
    check_function(text, path, function)
    return {"name": f"{path}:{function}", "convention": "trl"}, ""


def check_function(text: str, path: str, name: str) -> None:
    """Raise Refusal if the function cannot be called as TRL does with what surefoot has. text: of its file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not Python: {error}") from None
    found = next((one for one in tree.body if getattr(one, "name", None) == name), None)
    if isinstance(found, ast.AsyncFunctionDef):
        raise Refusal(f"{name} in {path} is asynchronous, and surefoot calls functions", "write it with def")
    if not isinstance(found, ast.FunctionDef):  # imported, or made by a call: seen when the run begins
        return
    takes = found.args
    free = {one.arg for one in (*takes.args, *takes.kwonlyargs)}
    optional = takes.args[len(takes.args) - len(takes.defaults) :]
    optional += [one for one, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is not None]
    needed = free - {one.arg for one in optional}
    if takes.posonlyargs or takes.vararg or not (takes.kwarg or free & set(_CALLED_WITH)):
        what = f"{name} in {path} cannot be called with {', '.join(_CALLED_WITH)} by keyword"
        raise Refusal(what, f"write def {name}(completions, **fields)")
    read = {one.value for one in ast.walk(found) if isinstance(one, ast.Constant)} | needed
    if missing := next((one for one in _ONLY_THERE if one in needed or (one in _ONLY_THERE[:2] and one in read)), None):
        raise Refusal(f"{name} in {path} reads {missing}, which belongs to TRL's trainer", "write it without")
