"""`surefoot evaluate answers`: the reward of a finished model's answers to prompts, and pass@k with its interval.

Answers and scores are made as in the evaluations of stage grpo, so the numbers of a run for its held-out prompts equal
those that it logged. The best answers can be written as records of stage sft (rejection sampling, Yuan et al. 2023),
best and worst as pairs of stage dpo (rounds of it are online DPO, Guo et al. 2024).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.data.audit import Audit
from surefoot.data.batching.loader import Layout
from surefoot.data.chat.render import messages
from surefoot.data.formats.preference import BESIDES, opening_field, read_prompt
from surefoot.data.formats.reader import CUSTOM
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.evaluate.loss import ROWS, evaluation_settings, tokens_for
from surefoot.evaluate.side_by_side import Only, sides
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.grpo.answering import Answering, Evaluated, evaluate_answers
from surefoot.methods.grpo.reward_models import RewardModel
from surefoot.methods.grpo.rollout import Passes
from surefoot.methods.grpo.task import prepare_grpo
from surefoot.methods.grpo.turns import environment_reward, named_environment, open_multi_turn, turn_marks
from surefoot.methods.losses.grpo import chances_at_k
from surefoot.methods.method import Notify
from surefoot.methods.open_model import OpenModel
from surefoot.methods.requests import DataRequest
from surefoot.methods.reward_source import checked_source
from surefoot.methods.rewards.terms import open_rewards
from surefoot.methods.sources import evaluated_specs, trained_specs
from surefoot.methods.waiting import WaitReporter
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.planning.drawing import AT_ONCE
from surefoot.report.intervals import mean_interval
from surefoot.report.trainer_log import finite
from surefoot.runs.revisions import pin, saved_commits
from surefoot.runs.run_folder import DATA
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import run_of
from surefoot.system.messages import counted


@dataclass(frozen=True)
class AnswersRequest:
    """How to generate and score answers.

    config: a config of stage grpo; provides rewards, environment, sampling, and the prompts.
    held_out: whether to use its held-out prompts instead of `train`.
    count: answers to draw per prompt.
    seed: seed of the draws.
    max_samples: number of prompts, from the first on; None: all.
    """

    config: RunConfig
    held_out: bool
    count: int
    seed: int
    max_samples: int | None = None


@dataclass(frozen=True)
class MeasuredAnswers:
    """Scored answers of every side to the prompts of one data set.

    results: by side, the base first.
    seconds: by side.
    """

    results: Mapping[str, Evaluated]
    seconds: Mapping[str, float]
    prompts: TokenizedDataset
    audit: Audit


def measure_answers(
    opened: OpenModel,
    request: AnswersRequest,
    *,
    only: Only | None = None,
    notify: Notify,
    on_progress: Callable[[str], None] = lambda text: None,
) -> MeasuredAnswers:
    """Answer each prompt greedily and `count` times at the config's temperature, and score the answers.

    on_progress: called with how far it is.

    Raises InputError for anything wrong with config, data or rewards before an answer is generated.
    """
    config, compared = request.config, sides(opened, only)
    rewards, environment = open_rewards(config.grpo.rewards), named_environment(config)
    own = run_of(opened.trained)
    if own is not None and request.held_out:
        config, _ = pin(config, saved_commits(own / DATA))
    length, template = config.data.max_length, config.data.template
    asked = DataRequest("", None if template == "auto" else template, length if isinstance(length, int) else None)
    tokens = tokens_for(opened, asked)
    data = prepare_grpo(config, tokens, opened.tokenizer)
    prompts, audit = (data.eval, data.eval_audit) if request.held_out else (data.train, data.audit)
    assert prompts is not None
    assert audit is not None
    prompts = replace(prompts, chosen=prompts.chosen[: request.max_samples])
    settings, waits = evaluation_settings(opened), WaitReporter(notify)
    micro = opened.plan.batch.micro.value if opened.plan else ROWS
    results, seconds = {}, {}
    with ExitStack() as held:
        multi_turn = None
        if environment is not None and config.grpo.environment is not None:
            rewards = (environment_reward(environment, config.grpo.environment.weight), *rewards)
            marks = turn_marks(config, tokens, opened.tokenizer, data, environment.role)
            recorded = Recorded(Path(held.enter_context(tempfile.TemporaryDirectory())), 0, 0)
            multi_turn = open_multi_turn(config, environment, marks, opened.tokenizer, recorded, list, waits, notify)
        answering = Answering(
            rollouts=EmbeddedRollouts(
                opened.model,
                AT_ONCE * micro,
                settings.forward,
                on_progress=lambda done, of: on_progress(f"{done:,} of {counted(of, 'answer')}"),
            ),
            multi_turn=multi_turn,
            rewards=rewards,
            reward_models=tuple(
                RewardModel(path, checked_source(path, opened.base, key).open().model)
                for path, key in config.grpo.reward_models.items()
            ),
            tokenizer=opened.tokenizer,
            tokens=tokens,
            limit=config.grpo.max_new_tokens,
            passes=Passes(
                Layout(tokens.pad_id, micro),
                settings.kernels,
                settings.forward,
                next(opened.model.parameters()).device,
                prompts.processor,
            ),
            waits=waits,
        )
        for side in compared:
            started = time.perf_counter()
            with side.entered():
                results[side.name] = evaluate_answers(
                    answering,
                    0,
                    prompts,
                    count=request.count,
                    temperature=config.grpo.temperature,
                    seed=request.seed,
                    needed=True,
                )
            seconds[side.name] = time.perf_counter() - started
    return MeasuredAnswers(results, seconds, prompts, audit)


def answers_to_json(measured: MeasuredAnswers, request: AnswersRequest) -> dict[str, Any]:
    """Return JSON values; a missing number is null."""
    grpo, source = request.config.grpo, measured.audit.source
    return {
        "data": {"file": source.file, "sha256": source.sha256, "prompts": len(measured.prompts)},
        "answers": request.count,
        "temperature": grpo.temperature,
        "seed": request.seed,
        "passes": grpo.eval_passes,
        "results": {
            name: _side_to_json(found, grpo.eval_passes) | {"seconds": measured.seconds[name]}
            for name, found in measured.results.items()
        },
    }


def _side_to_json(found: Evaluated, least: float) -> dict[str, Any]:
    passed, drawn = found.passed(least)
    logged = {name: finite(value) for name, value in found.metrics(least).items()}
    chances = {k: chances_at_k(passed, drawn, k) for k in found.sizes}
    return {
        **{name: value for name, value in logged.items() if not name.startswith("pass_at_")},
        "pass_at": {
            str(k): {
                "value": logged[f"pass_at_{k}"],
                "interval": list(mean_interval(own, found.sizes[-1])) if own else None,
            }
            for k, own in chances.items()
        },
        "without_score": int((found.sizes[-1] - drawn).sum()),
    }


def require_records(config: RunConfig, flag: str) -> None:
    """Raise InputError, naming `flag`, if answers cannot be written as records of other stages: with an environment,
    or if a user's function reads the records."""
    if config.grpo.environment is not None:
        what = "writes answers of one turn, and grpo.environment gives them several"
        fix = "leave it out: --out has all answers with their turns in answers.jsonl, to make records of"
        raise InputError(Fault(flag, what, fix, code="SF-USE-FLAG"))
    if any(one.format == CUSTOM for one in evaluated_specs(config) or trained_specs(config)):
        what = "needs records that surefoot reads itself, and a function reads these"
        raise InputError(Fault(flag, what, "leave it out", code="SF-USE-FLAG"))


def best_records(measured: MeasuredAnswers, least: float) -> Iterator[dict[str, Any]]:
    """Yield the last side's best answer to each prompt as a record of stage sft, with its score and reasons.

    Of equal answers the first is taken; none that did not end, is empty, or scores below `least`. Instructions stay
    instructions, because templates may have a slot for their input; other prompts become messages. Earlier answers are
    not learned in either form.
    """
    for prompt, fit in _fit_answers(measured):
        best = max((one for one in fit if one["score"] >= least), key=itemgetter("score"), default=None)
        if best is not None:
            answer = {"output" if _is_instruction(prompt) else "completion": _answer(best, prompt)}
            yield {**prompt, **answer, "score": best["score"], "rewards": best["rewards"]}


def pair_records(measured: MeasuredAnswers) -> Iterator[dict[str, Any]]:
    """Yield the last side's best and worst answer to each prompt as a record of stage dpo, with their scores. Answers
    that did not end or are empty do not count, and neither does a prompt whose answers have one score. A reward may
    score one text twice: the worst answer is one of another text than the best."""
    for prompt, fit in _fit_answers(measured):
        best = max(fit, key=itemgetter("score"), default=None)
        others = [one for one in fit if best and one["answer"].strip() != best["answer"].strip()]
        if best and others and (worst := min(others, key=itemgetter("score")))["score"] < best["score"]:
            pair = {name: _answer(one, prompt) for name, one in (("chosen", best), ("rejected", worst))}
            scores = {"score_chosen": best["score"], "score_rejected": worst["score"]}
            yield {**prompt, **pair, **scores}


def _fit_answers(measured: MeasuredAnswers) -> Iterator[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """Yield each prompt as fields of a record, and the last side's drawn answers to it that ended, are not empty and
    have a score. Instructions stay instructions if all prompts are."""
    (found,) = list(measured.results.values())[-1:]
    records = [measured.prompts.record(place) for place in range(len(measured.prompts))]
    instructions = all(opening_field(one) == "instruction" for one in records)
    count = found.sizes[-1]
    for place, record in enumerate(records):
        drawn = found.kept[place * count : (place + 1) * count]
        fit = [one for one in drawn if one["ended"] and one["answer"].strip() and one["score"] is not None]
        shown = [str(Path(one.path).absolute()) for one in measured.prompts.shown(place)]
        yield {**_prompt(record, instructions), **({"images": shown} if shown else {})}, fit


def _is_instruction(prompt: Mapping[str, Any]) -> bool:
    return "instruction" in prompt


def _answer(kept: Mapping[str, Any], prompt: Mapping[str, Any]) -> str | list[dict[str, str]]:
    return kept["answer"] if _is_instruction(prompt) else [{"role": "assistant", "content": kept["answer"]}]


def _prompt(record: Mapping[str, Any], instructions: bool) -> dict[str, Any]:
    if instructions:
        return {name: record[name] for name in ("instruction", *BESIDES) if name in record}
    prompt = read_prompt(record)
    return {"prompt": messages(prompt.turns, "pictures"), **({"tools": list(prompt.tools)} if prompt.tools else {})}
