"""The eight commonsense sets of LLM-Adapters: their questions, how answers are parsed, the published results.

Parsing follows the published rule with its weakness: the first of the set's answers that occurs anywhere in the
response, case-sensitive; if none does, the answer is wrong. So "not answer1 but answer2" is answer1.

The published accuracies (per cent) are of models fine-tuned on the 170k mixture and decoded with four beams: Hu et al.,
"LLM-Adapters", EMNLP 2023, and Liu et al., "DoRA", ICML 2024, both from the tables of their repositories. Repetitions
differ by several points between seeds, batch sizes and PEFT versions, more than the two methods do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config.paths import nearest_path
from surefoot.data.formats import RowFault
from surefoot.data.formats.conversation import filled, optional
from surefoot.data.formats.reader import each_row
from surefoot.data.sources.records import Row, open_file, parse_rows
from surefoot.report.intervals import wilson
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_word

Record = dict[str, Any]  # a record of a question file, with or without an answer
FILE = "test.json"
TRAINED = "trained"  # value of --template: the template of training
_LAYOUTS = f"dataset/SET/{FILE} or SET/{FILE}"
MARKER = "### Response:"
SENTENCE = "the correct answer is {}"  # the answer's form in the training data
_FORMAT = re.compile(r"Answer format: ?([\w/]+)")


@dataclass(frozen=True)
class AnswerSet:
    """One question set.

    label: the column's heading.
    answers: the possible answers.
    size: records of the published test set.
    chance: accuracy of guessing.
    """

    name: str
    label: str
    answers: tuple[str, ...]
    size: int
    chance: float


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word}{number}" for number in range(1, count + 1))


SETS: tuple[AnswerSet, ...] = (
    AnswerSet("boolq", "BoolQ", ("true", "false"), 3270, 1 / 2),
    AnswerSet("piqa", "PIQA", _numbered("solution", 2), 1838, 1 / 2),
    AnswerSet("social_i_qa", "SIQA", _numbered("answer", 5), 1954, 1 / 3),
    AnswerSet("hellaswag", "HellaS", _numbered("ending", 4), 10042, 1 / 4),
    AnswerSet("winogrande", "WinoG", _numbered("option", 2), 1267, 1 / 2),
    AnswerSet("ARC-Easy", "ARC-e", _numbered("answer", 5), 2376, 1 / 4),
    AnswerSet("ARC-Challenge", "ARC-c", _numbered("answer", 5), 1172, 1 / 4),
    AnswerSet("openbookqa", "OBQA", _numbered("answer", 5), 500, 1 / 4),
)


@dataclass(frozen=True)
class Score:
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def standard_error(self) -> float:
        """Standard error of a binomial share: sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.total)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        return wilson(self.accuracy, self.total)


def average(scores: Sequence[Score]) -> tuple[float, float]:
    """The mean accuracy, with equal weight per set, and its standard error."""
    mean = sum(score.accuracy for score in scores) / len(scores)
    return mean, math.sqrt(sum(score.standard_error**2 for score in scores)) / len(scores)


def average_interval(scores: Sequence[Score]) -> tuple[float, float]:
    """95 % interval of the mean accuracy from the sets' own intervals, by adding squared distances (Zou and Donner,
    2008)."""
    mean, _ = average(scores)
    below, above = (
        math.sqrt(sum((score.accuracy - score.interval[end]) ** 2 for score in scores)) / len(scores) for end in (0, 1)
    )
    return mean - below, mean + above


def choose_sets(request: str) -> tuple[AnswerSet, ...]:
    """Parse "all" or comma-separated set names. Raises InputError for an unknown one."""
    if request == "all":
        return SETS
    names = [name.strip() for name in request.split(",") if name.strip()]
    known = {one.name: one for one in SETS}
    for name in names:
        if name not in known:
            near = nearest_word(name, known)
            fix = f"did you mean {near}?" if near else f"known: {', '.join(known)}, or all"
            raise InputError(Fault("--sets", f"unknown set {name!r}", fix, code="SF-EVALUATE"))
    if not names:
        raise InputError(Fault("--sets", "names no set", f"known: {', '.join(known)}, or all", code="SF-EVALUATE"))
    return tuple(one for one in SETS if one.name in names)


def read_set(data: Path, one: AnswerSet, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the records of a set.

    data: the folder that contains `dataset/`, or that folder itself.
    limit: use only the first N records.

    Raises InputError for a missing folder or file, and for an invalid record.
    """
    path = set_file(data, one)
    if not data.is_dir():
        layouts = f"expected a folder with {_LAYOUTS}"
        if data.exists():
            fix = f"give the folder: {data.parent}"
            raise InputError(Fault(str(data), f"is a file; {layouts}", fix, code="SF-USE-FOLDER"))
        fix = nearest_path(data, ())
        raise InputError(Fault(str(data), f"no such folder; {layouts}", fix, code="SF-FILE-MISSING"))
    if not path.is_file():
        raise InputError(
            Fault(
                str(path),
                f"no such file for the set {one.name}",
                f"DATA must contain {_LAYOUTS}",
                code="SF-FILE-MISSING",
            )
        )
    rows = parse_rows(open_file(path))[:limit]
    return each_row(rows, lambda row: _checked(row, one), str(path))


def set_file(data: Path, one: AnswerSet) -> Path:
    root = data / "dataset" if (data / "dataset").is_dir() else data
    return root / one.name / FILE


def _checked(row: Row, one: AnswerSet) -> dict[str, Any]:
    filled(row.value, "instruction")
    optional(row.value, "input")
    answer = filled(row.value, "answer")
    if answer not in one.answers:
        raise RowFault(f"its answer is {answer!r}, but those of {one.name} are {', '.join(one.answers)}")
    if answer not in options_of(row.value, one):
        raise RowFault(f"its answer is {answer!r}, which its instruction does not offer")
    return row.value


def options_of(record: Mapping[str, Any], one: AnswerSet) -> tuple[str, ...]:
    """The answers that the instruction offers; all of the set's if it names none."""
    found = _FORMAT.search(record["instruction"])
    offered = found[1].split("/") if found else []
    return tuple(word for word in one.answers if word in offered) or one.answers


def response_of(text: str) -> str:
    """The part of a generated text before it begins another prompt."""
    return text.partition(MARKER)[0].strip()


def extract(response: str, one: AnswerSet) -> str:
    """The first of the set's answers in the response, "" if there is none."""
    found = re.search("|".join(one.answers), response)
    return found[0] if found else ""


LLM_ADAPTERS = "Hu et al. 2023, LLM-Adapters"
DORA = "Liu et al. 2024, DoRA"
ORDER = ("boolq", "piqa", "social_i_qa", "hellaswag", "winogrande", "ARC-Easy", "ARC-Challenge", "openbookqa")


@dataclass(frozen=True)
class PublishedRow:
    """Published accuracies of one fine-tuned model.

    accuracies: per cent, in ORDER.
    average: as published.
    lr: learning rate of the fine-tuning.
    """

    model: str
    method: str
    rank: int
    lr: float
    accuracies: tuple[float, ...]
    average: float
    source: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.method} r {self.rank}"

    def accuracy(self, name: str) -> float:
        return self.accuracies[ORDER.index(name)]


PUBLISHED: tuple[PublishedRow, ...] = (
    PublishedRow("LLaMA-7B", "LoRA", 32, 3e-4, (68.9, 80.7, 77.4, 78.1, 78.8, 77.8, 61.3, 74.8), 74.7, LLM_ADAPTERS),
    PublishedRow("LLaMA-7B", "LoRA", 32, 3e-4, (67.5, 80.8, 78.2, 83.4, 80.4, 78.0, 62.6, 79.1), 76.3, DORA),
    PublishedRow("LLaMA-7B", "DoRA", 16, 2e-4, (70.0, 82.6, 79.7, 83.2, 80.6, 80.6, 65.4, 77.6), 77.5, DORA),
    PublishedRow("LLaMA-7B", "DoRA", 32, 1e-4, (69.7, 83.4, 78.6, 87.2, 81.0, 81.9, 66.2, 79.2), 78.4, DORA),
    PublishedRow("LLaMA2-7B", "LoRA", 32, 3e-4, (69.8, 79.9, 79.5, 83.6, 82.6, 79.8, 64.7, 81.0), 77.6, DORA),
    PublishedRow("LLaMA2-7B", "DoRA", 32, 2e-4, (71.8, 83.7, 76.0, 89.1, 82.6, 83.7, 68.2, 82.4), 79.7, DORA),
    PublishedRow("LLaMA3-8B", "LoRA", 32, 3e-4, (70.8, 85.2, 79.9, 91.7, 84.3, 84.2, 71.2, 79.0), 80.8, DORA),
    PublishedRow("LLaMA3-8B", "DoRA", 16, 1e-4, (74.5, 88.8, 80.3, 95.5, 84.7, 90.1, 79.1, 87.2), 85.0, DORA),
    PublishedRow("LLaMA3-8B", "DoRA", 32, 1e-4, (74.6, 89.3, 79.9, 95.5, 85.6, 90.5, 80.4, 85.8), 85.2, DORA),
)
