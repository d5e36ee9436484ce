"""`surefoot evaluate commonsense`: the eight sets, asked as published or by the likelihood of the options.

published: four beams, 32 new tokens, no sampling, the legacy prompt. The originals hand the model no mask, so pads of a
shorter prompt were attended; here they are masked, which is what their scripts' batch size of 1 comes to.
fast: each option is scored as the answer that training writes, "the correct answer is …".

Every check comes before the first question. After every batch the file of a set is on the disk; a second start finds
what is there, makes sure that it belongs to the same question, model and method, and goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from surefoot import durable
from surefoot.data.formats import Conversation, Turn
from surefoot.data.segments import Template, prompt_ids
from surefoot.data.templates import make_template
from surefoot.data.text_encoder import Piece
from surefoot.errors import Fault, InputError
from surefoot.evaluate.commonsense import (
    SENTENCE,
    AnswerSet,
    Score,
    extract,
    options_of,
    read_set,
    response_of,
    set_file,
)
from surefoot.families.files import read_json
from surefoot.families.templates import named_row
from surefoot.models.beams import beam_answers
from surefoot.models.continuations import log_likelihoods
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.forward import causal_model
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.stages.identity import base_fingerprint
from surefoot.stages.open_model import OpenModel
from surefoot.stages.side_by_side import Only, Side, sides

Mode = Literal["published", "fast"]
Record = dict[str, Any]
LEGACY = "commonsense-eval"
TRAINED = "trained"  # as --template: what the model was trained with
BEAMS, NEW_TOKENS = 4, 32
_OPTION_TOKENS = 16  # room that the longest option certainly fits into


@dataclass(frozen=True)
class CommonsenseRequest:
    """data: holds `dataset/<set>/test.json`. rows: questions at once. out: folder of the files. names: of the model and
    of the adapter, for the files; None: the folders' own."""

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
    """One set, ready to be asked. prompts: token ids of each record. sha256: of the records and prompts."""

    set: AnswerSet
    records: list[Record]
    prompts: list[list[int]]
    sha256: str


@dataclass(frozen=True)
class _Task:
    """One side on one set. done: records that an earlier start has answered."""

    side: Side
    questions: _Questions
    file: Path
    identity: dict[str, Any]
    done: list[Record]


@dataclass(frozen=True)
class CommonsenseFound:
    """scores: side -> set -> score. labels: side -> name of its rows and files. files: all that were written."""

    scores: Mapping[str, Mapping[str, Score]]
    labels: Mapping[str, str]
    files: tuple[Path, ...]


def evaluate_commonsense(
    opened: OpenModel, asked: CommonsenseRequest, *, model: str, adapter: str | None, say: Callable[[str], None]
) -> CommonsenseFound:
    """Answer and score. model, adapter: as the user named them. say: gets `test:i/total | accuracy …` after each batch.

    Raises InputError for a record or set that is not right, a prompt that does not fit, and a file in the way.
    """
    template = chosen_template(opened, asked.template)
    questions = [_questions(opened, template, one, asked) for one in asked.sets]
    compared = sides(opened, asked.only)
    labels = {side.name: side_label(opened, side, asked.names, model, adapter) for side in compared}
    tasks = [
        _task(opened, asked, side, labels[side.name], one) for side in compared for one in questions
    ]  # whatever is in the way is found before the first answer
    asked.out.mkdir(parents=True, exist_ok=True)
    scores: dict[str, dict[str, Score]] = {side.name: {} for side in compared}
    for task in tasks:
        say(f"{labels[task.side.name]} on {task.questions.set.name}")
        with task.side.entered(), opened.context():
            scores[task.side.name][task.questions.set.name] = _run(opened, template, task, asked, say)
    return CommonsenseFound(scores, labels, tuple(task.file for task in tasks))


def chosen_template(opened: OpenModel, name: str) -> Template:
    """Raises InputError for a name that is not in the table or that this tokenizer cannot write."""
    if name == TRAINED:
        return opened.template
    row = named_row(name, lambda text: text in opened.encoder.control.values())
    if isinstance(row, Fault):
        raise InputError(Fault("--template", row.what, row.fix))
    return make_template(name, opened.encoder, opened.tokens.stop.value)


def side_label(
    opened: OpenModel, side: Side, names: tuple[str | None, str | None], model: str, adapter: str | None
) -> str:
    """<model>-<adapter>, as the files begin. The base alone is called base, whether or not an adapter stands beside it:
    its answers are the same, and are not asked for twice."""
    settings = read_json(opened.trained / ADAPTER_CONFIG) if opened.trained != opened.base else {}
    of_model = names[0] or _last_word(settings.get("base_model_name_or_path") or model if adapter is None else model)
    if side.name != "adapter":
        return f"{of_model}-base"
    return f"{of_model}-{names[1] or _last_word(adapter or model)}"


def _last_word(path: str) -> str:
    """Of a path or hub id; for `runs/x/checkpoint-7` the run as well."""
    parts = [part for part in Path(path).resolve().parts if part] if Path(path).is_dir() else path.split("/")
    name = "-".join(parts[-2:]) if parts[-1].startswith("checkpoint-") else parts[-1]
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)


def _questions(opened: OpenModel, template: Template, one: AnswerSet, asked: CommonsenseRequest) -> _Questions:
    records = read_set(asked.data, one, asked.max_samples)
    prompts = [prompt_ids(_conversation(record), template, opened.encoder, opened.bos_id) for record in records]
    room = opened.positions - (NEW_TOKENS if asked.mode == "published" else _OPTION_TOKENS)
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) > room:
            what = f"row {number}: its prompt has {len(prompt)} tokens, and of the model's {opened.positions} positions"
            raise InputError(
                Fault(
                    str(set_file(asked.data, one)),
                    f"{what} an answer takes {opened.positions - room}",
                    "leave the set out",
                )
            )
    digest = hashlib.sha256(json.dumps([records, prompts], ensure_ascii=False).encode()).hexdigest()
    return _Questions(one, records, prompts, digest)


def _conversation(record: Record, answer: str | None = None) -> Conversation:
    question = Turn("user", record["instruction"], record.get("input") or "")
    return Conversation((question, *([Turn("assistant", answer)] if answer is not None else [])))


def _task(opened: OpenModel, asked: CommonsenseRequest, side: Side, label: str, questions: _Questions) -> _Task:
    file = asked.out / f"{label}-{questions.set.name}.json"
    identity = {
        "set": questions.set.name,
        "records and prompts": questions.sha256,
        "base": base_fingerprint(opened.base),
        "adapter": _adapter_fingerprint(opened.trained) if side.name == "adapter" else None,
        "mode": asked.mode,
        "precision": _precision(opened),
    }
    if asked.mode == "published":
        identity |= {"beams": BEAMS, "new tokens": NEW_TOKENS}
    return _Task(side, questions, file, identity, [] if asked.overwrite else _answered(file, identity, questions))


def _precision(opened: OpenModel) -> str:
    """How the base is held: the same whether or not an adapter lies over it."""
    embedding = causal_model(opened.model).get_input_embeddings().weight
    packed = any(parameter.dtype == torch.uint8 for parameter in opened.model.parameters())
    return f"{embedding.dtype}{', nf4' if packed else ''} on {embedding.device.type}"


def _adapter_fingerprint(folder: Path) -> str:
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "bos_zero_config.json")
    parts = [durable.sha256_file(folder / name) for name in names if (folder / name).is_file()]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def identity_file(file: Path) -> Path:
    """What the answers in a set's file belong to; it stands apart, because the file itself is a plain list."""
    return file.parent / "identity" / file.name


def _answered(file: Path, identity: Mapping[str, Any], questions: _Questions) -> list[Record]:
    """What an earlier start has answered. Raises InputError where the file is another's."""
    if not file.exists():
        return []
    anew = "name another --out or --label, or start anew with --overwrite"
    if not identity_file(file).is_file():
        what = "is in the way, and was not written by `surefoot evaluate commonsense`"
        raise InputError(Fault(str(file), what, anew))
    then = read_json(identity_file(file))
    if changed := [key for key in {**then, **identity} if then.get(key) != identity.get(key)]:
        what = f"holds answers of another evaluation (not the same: {', '.join(changed)})"
        raise InputError(Fault(str(file), what, anew))
    done = json.loads(file.read_text(encoding="utf-8"))
    same = all({**one, **record} == one for one, record in zip(done, questions.records, strict=False))
    if len(done) > len(questions.records) or not same or not all("flag" in one for one in done):
        raise InputError(Fault(str(file), "was changed since it was written", anew))
    return done


def _run(
    opened: OpenModel, template: Template, task: _Task, asked: CommonsenseRequest, say: Callable[[str], None]
) -> Score:
    questions, graded = task.questions, list(task.done)
    texts = [json.dumps(one, indent=2, ensure_ascii=False) for one in graded]
    total = len(questions.records)
    if graded:
        say(f"{len(graded)} of {total} were answered before: going on in {task.file}")
    else:
        durable.remove(task.file)  # first: a kill between the two must not leave old answers under a new identity
        identity_file(task.file).parent.mkdir(exist_ok=True)
        durable.write_json(identity_file(task.file), task.identity)
    answer = _generated if asked.mode == "published" else _likeliest
    for start in range(len(graded), total, asked.rows):
        batch = slice(start, start + asked.rows)
        records, prompts = questions.records[batch], questions.prompts[batch]
        for record, found in zip(records, answer(opened, template, questions.set, records, prompts), strict=True):
            graded.append({**record, **found, "flag": found["pred"] == record["answer"]})
            texts.append(json.dumps(graded[-1], indent=2, ensure_ascii=False))
        durable.write_text(task.file, "[\n" + ",\n".join(texts) + "\n]\n")
        correct = sum(one["flag"] for one in graded)
        say(f"test:{len(graded)}/{total} | accuracy {correct}  {correct / len(graded)}")
    say("test finished")
    return Score(sum(one["flag"] for one in graded), total)


def _generated(
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


def _likeliest(
    opened: OpenModel,
    template: Template,
    one: AnswerSet,
    records: Sequence[Record],
    prompts: Sequence[list[int]],
) -> Iterator[Record]:
    offered = [options_of(record, one) for record in records]
    ids = [
        [_option_ids(opened, template, record, option) for option in options]
        for record, options in zip(records, offered, strict=True)
    ]
    scored = log_likelihoods(opened.model, prompts, ids, pad_id=opened.pad_id)
    for options, scores in zip(offered, scored, strict=True):
        best = options[scores.index(max(scores))]
        likelihoods = {option: round(score, 6) for option, score in zip(options, scores, strict=True)}
        yield {"output_pred": SENTENCE.format(best), "pred": best, "log_likelihoods": likelihoods}


def _option_ids(opened: OpenModel, template: Template, record: Record, option: str) -> list[int]:
    """The answer's tokens as training wrote them, without what ends an answer."""
    segments = template.segments(_conversation(record, SENTENCE.format(option)))
    answer = [segment for segment in segments if segment.answer]
    last = max(place for place, segment in enumerate(answer) if segment.content)
    text = "".join(segment.text for segment in answer[: last + 1])
    (ids,) = opened.encoder.encode([Piece(text, literal=True, opening=False)])
    return ids
