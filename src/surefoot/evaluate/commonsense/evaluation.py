"""`surefoot evaluate commonsense`: the eight sets, answered as published or by the most likely option.

published: four beams, 32 new tokens, no sampling, the legacy prompt. The original code passes no mask, so padding of
shorter prompts was attended; here it is masked, which equals the batch size of 1 in the published scripts.
fast: each option is scored as the answer used in training, "the correct answer is …".

All checks come before the first question. After every batch the set's file is written; a second start finds it, checks
that it belongs to the same questions, model and method, and continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, Turn
from surefoot.data.tokenize.segments import Piece, Template, prompt_ids
from surefoot.evaluate.commonsense.files import answered, identity_file, model_identity, side_labels, summary_file
from surefoot.evaluate.commonsense.protocol import (
    SENTENCE,
    TRAINED,
    AnswerSet,
    Record,
    Score,
    extract,
    options_of,
    read_set,
    response_of,
    set_file,
)
from surefoot.evaluate.side_by_side import Only, Side, sides
from surefoot.families.templates import named_row
from surefoot.methods.open_model import OpenModel
from surefoot.models.beams import beam_answers
from surefoot.models.continuations import log_likelihoods
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import own_findings

BEAMS, NEW_TOKENS = 4, 32
OPTION_TOKENS = 16  # an upper bound for the longest option


def conversation(record: Record, answer: str | None = None) -> Conversation:
    question = Turn("user", record["instruction"], record.get("input") or "")
    return Conversation((question, *([Turn("assistant", answer)] if answer is not None else [])))


def generated(
    opened: OpenModel,
    template: Template,
    one: AnswerSet,
    records: Sequence[Record],
    prompts: Sequence[list[int]],
) -> Iterator[Record]:
    answers = beam_answers(
        opened.model,
        opened.tokenizer,
        prompts,
        beams=BEAMS,
        max_new_tokens=NEW_TOKENS,
        stop_ids=template.stop_ids,
        pad_id=opened.pad_id,
    )
    for answer in answers:
        response = response_of(answer.text)
        yield {"output_pred": response, "pred": extract(response, one)}


def likeliest(
    opened: OpenModel,
    template: Template,
    one: AnswerSet,
    records: Sequence[Record],
    prompts: Sequence[list[int]],
) -> Iterator[Record]:
    offered = [options_of(record, one) for record in records]
    ids = [
        [option_ids(opened, template, record, option) for option in options]
        for record, options in zip(records, offered, strict=True)
    ]
    scored = log_likelihoods(opened.model, prompts, ids, pad_id=opened.pad_id)
    for options, scores in zip(offered, scored, strict=True):
        best = options[scores.index(max(scores))]
        likelihoods = {option: round(score, 6) for option, score in zip(options, scores, strict=True)}
        yield {"output_pred": SENTENCE.format(best), "pred": best, "log_likelihoods": likelihoods}


def option_ids(opened: OpenModel, template: Template, record: Record, option: str) -> list[int]:
    """Token ids of the answer as in training, without the end of the answer."""
    segments = template.segments(conversation(record, SENTENCE.format(option)))
    answer = [segment for segment in segments if segment.answer]
    last = max(place for place, segment in enumerate(answer) if segment.content)
    text = "".join(segment.text for segment in answer[: last + 1])
    (ids,) = opened.encoder.encode([Piece(text, literal=True, opening=False)])
    return ids


Mode = Literal["published", "fast"]
LEGACY = "commonsense-eval"


@dataclass(frozen=True)
class CommonsenseRequest:
    """What to ask a model, and where to write the answers.

    data: folder with `dataset/<set>/test.json`.
    rows: questions per forward pass.
    out: folder of the files.
    names: names of the model and of the adapter for the files; None: the folders' names.
    """

    data: Path
    sets: tuple[AnswerSet, ...]
    out: Path
    mode: Mode = "published"
    rows: int = 8
    max_samples: int | None = None
    template: str = LEGACY
    names: tuple[str | None, str | None] = (None, None)
    overwrite: bool = False
    only: Only | None = None


@dataclass(frozen=True)
class _Questions:
    """One set with its prompts.

    prompts: token ids of each record.
    room: length of the longest prompt that leaves room for an answer; longer ones are skipped.
    sha256: of the records and prompts.
    identity: everything else that the answers depend on.
    """

    set: AnswerSet
    records: list[Record]
    prompts: list[list[int]]
    room: int
    sha256: str
    identity: Mapping[str, Any]

    def is_too_long(self, prompt: list[int]) -> bool:
        return len(prompt) > self.room


@dataclass(frozen=True)
class _Task:
    """One side on one set. done: records answered by an earlier start."""

    side: Side
    questions: _Questions
    file: Path
    identity: dict[str, Any]
    done: list[Record]


@dataclass(frozen=True)
class CommonsenseFound:
    """Scores of every side on every set.

    scores: side -> set -> score.
    labels: side -> name in tables and files.
    files: all files written.
    too_long: set -> number of records that were skipped and count as wrong, if any.
    otherwise: see `template_caution`.
    """

    scores: Mapping[str, Mapping[str, Score]]
    labels: Mapping[str, str]
    files: tuple[Path, ...]
    too_long: Mapping[str, int]
    otherwise: str


def evaluate_commonsense(
    opened: OpenModel, request: CommonsenseRequest, *, model: str, adapter: str | None, say: Callable[[str], None]
) -> CommonsenseFound:
    """Answer and score.

    model, adapter: as the user named them.
    say: called with `test:i/total | accuracy …` after each tenth of a set.

    A record whose prompt leaves no room for an answer counts as wrong, like an answer that names no option. Skipping it
    would give models with fewer positions a different set.

    Raises InputError for an invalid record or set, a set of which no prompt fits, and a foreign file in the way.
    """
    template = chosen_template(opened, request.template)
    questions = [_questions(opened, template, one, request) for one in request.sets]
    # For both sides even with --only, so that a common name is always refused.
    every = side_labels(opened, sides(opened), request.names, model, adapter)
    compared = sides(opened, request.only)
    labels = {side.name: every[side.name] for side in compared}
    identities = {side.name: model_identity(opened, side) for side in compared}
    tasks = [
        _task(request, side, labels[side.name], identities[side.name], one) for side in compared for one in questions
    ]  # files in the way are found before the first answer
    summary = summary_file(request.out, labels)
    own_findings(summary, "sides", [summary.with_suffix(".png").name])
    durable.make_folders(request.out)
    scores: dict[str, dict[str, Score]] = {side.name: {} for side in compared}
    for task in tasks:
        say(f"{labels[task.side.name]} on {task.questions.set.name}")
        with task.side.entered(), opened.context():
            scores[task.side.name][task.questions.set.name] = _run(opened, template, task, request, say)
    too_long = {one.set.name: sum(map(one.is_too_long, one.prompts)) for one in questions}
    left = {name: count for name, count in too_long.items() if count}
    files = tuple(task.file for task in tasks)
    return CommonsenseFound(scores, labels, files, left, template_caution(opened, request.template))


def chosen_template(opened: OpenModel, name: str) -> Template:
    """Raises InputError for an unknown name or a template that this tokenizer cannot use."""
    if name == TRAINED:
        return opened.template
    row = named_row(name, lambda text: text in opened.encoder.control.values())
    if isinstance(row, Fault):
        raise InputError(Fault("--template", row.what, row.fix, code="SF-DATA-TEMPLATE"))
    return make_template(name, opened.encoder, opened.tokens.stop.value)


def template_caution(opened: OpenModel, name: str) -> str:
    """A caution if the model was trained with another prompt than the template `name`; else empty."""
    if opened.plan is None or chosen_template(opened, name).identity == opened.template.identity:
        return ""
    return (
        f"evaluated with the template {name}, but trained with {opened.tokens.template.value}: "
        f"--template {TRAINED} uses the template of training"
    )


def _questions(opened: OpenModel, template: Template, one: AnswerSet, request: CommonsenseRequest) -> _Questions:
    records = read_set(request.data, one, request.max_samples)
    prompts = [prompt_ids(conversation(record), template, opened.encoder, opened.bos_id) for record in records]
    room = opened.positions - (NEW_TOKENS if request.mode == "published" else OPTION_TOKENS)
    if (shortest := min(map(len, prompts))) > room:
        what = f"even its shortest prompt has {shortest} tokens, and of the model's {opened.positions} positions"
        what += f" an answer takes {opened.positions - room}"
        raise InputError(Fault(str(set_file(request.data, one)), what, "leave the set out", code="SF-DATA-LENGTH"))
    digest = hashlib.sha256(json.dumps([records, prompts], ensure_ascii=False).encode()).hexdigest()
    return _Questions(
        one, records, prompts, room, digest, _identity_of(opened, template, one, records[0], request.mode)
    )


def _identity_of(opened: OpenModel, template: Template, one: AnswerSet, record: Record, mode: Mode) -> dict[str, Any]:
    """What the prompts do not show: the end of an answer, and the tokens of an option."""
    if mode == "published":
        return {"beams": BEAMS, "new tokens": NEW_TOKENS, "stop tokens": sorted(template.stop_ids)}
    return {"option tokens": {answer: option_ids(opened, template, record, answer) for answer in one.answers}}


def _task(
    request: CommonsenseRequest, side: Side, label: str, of_model: Mapping[str, Any], questions: _Questions
) -> _Task:
    file = request.out / f"{label}-{questions.set.name}.json"
    identity = {
        "set": questions.set.name,
        "records and prompts": questions.sha256,
        "mode": request.mode,
        **of_model,
        **questions.identity,
    }
    done = answered(file, identity, questions.records, request.overwrite)
    return _Task(side, questions, file, identity, done)


def _run(
    opened: OpenModel, template: Template, task: _Task, request: CommonsenseRequest, say: Callable[[str], None]
) -> Score:
    questions, graded = task.questions, list(task.done)
    texts = [json.dumps(one, indent=2, ensure_ascii=False) for one in graded]
    total = len(questions.records)
    if graded:
        say(f"{len(graded)} of {total} were answered before: continuing {task.file}")
    else:
        durable.remove(task.file)  # removed first: a kill in between must not leave old answers with a new identity
        durable.make_folders(identity_file(task.file).parent)
        durable.write_json(identity_file(task.file), task.identity)
    answer = generated if request.mode == "published" else likeliest
    for start in range(len(graded), total, request.rows):
        batch = slice(start, start + request.rows)
        pairs = list(zip(questions.records[batch], questions.prompts[batch], strict=True))
        fit = [(record, prompt) for record, prompt in pairs if not questions.is_too_long(prompt)]
        records, prompts = [record for record, _ in fit], [prompt for _, prompt in fit]
        answers = iter(answer(opened, template, questions.set, records, prompts)) if fit else iter(())
        for record, prompt in pairs:
            found = _unanswered(prompt) if questions.is_too_long(prompt) else next(answers)
            graded.append({**record, **found, "flag": found["pred"] == record["answer"]})
            texts.append(json.dumps(graded[-1], indent=2, ensure_ascii=False))
        # Rewritten completely after each batch, so that it is always a JSON list as in the original scripts.
        durable.write_text(task.file, "[\n" + ",\n".join(texts) + "\n]\n")
        if is_told(start, len(graded), total):
            correct = sum(one["flag"] for one in graded)
            say(f"test:{len(graded)}/{total} | accuracy {correct}  {correct / len(graded)}")
    say("test finished")
    return Score(sum(one["flag"] for one in graded), total)


def is_told(before: int, now: int, total: int) -> bool:
    """Whether a tenth of a set was completed between two numbers of answers."""
    return 10 * before // total < 10 * now // total


def _unanswered(prompt: list[int]) -> Record:
    return {"output_pred": "", "pred": "", "too_long": len(prompt)}
