"""Results on the commonsense sets as table rows next to the published ones, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from surefoot.evaluate.commonsense.evaluation import BEAMS, NEW_TOKENS, CommonsenseFound, CommonsenseRequest
from surefoot.evaluate.commonsense.protocol import (
    LLM_ADAPTERS,
    PUBLISHED,
    AnswerSet,
    PublishedRow,
    Score,
    average,
    average_interval,
)
from surefoot.report.tables.evaluation import Cell, ScoreRow


def score_rows(found: CommonsenseFound, sets: Sequence[AnswerSet]) -> list[ScoreRow]:
    """Measured rows, then published ones, over the same sets."""
    measured = [_measured(found.labels[side], scores, sets) for side, scores in found.scores.items()]
    return [*measured, *(_published(row, sets) for row in PUBLISHED)]


def _measured(label: str, scores: Mapping[str, Score], sets: Sequence[AnswerSet]) -> ScoreRow:
    cells = {
        one.label: Cell(score.accuracy, score.standard_error, f"{score.correct}/{score.total}", score.interval)
        for one in sets
        for score in (scores[one.name],)
    }
    over = [scores[one.name] for one in sets]
    return ScoreRow(label, cells, Cell(*average(over), interval=average_interval(over)), measured=True)


def _published(row: PublishedRow, sets: Sequence[AnswerSet]) -> ScoreRow:
    cells = {one.label: Cell(row.accuracy(one.name) / 100) for one in sets}
    whole = len(sets) == len(row.accuracies)
    mean = row.average / 100 if whole else sum(cell.accuracy for cell in cells.values()) / len(cells)
    source = " (LLM-Adapters)" if row.source == LLM_ADAPTERS else ""
    return ScoreRow(row.name + source, cells, Cell(mean), measured=False, group=row.method)


def cautions(found: CommonsenseFound, request: CommonsenseRequest) -> Iterator[str]:
    """Cautions for a comparison of the rows."""
    if found.otherwise:
        yield found.otherwise
    counts = next(iter(found.scores.values()))
    parts = [
        f"{one.name} {counts[one.name].total:,} of {one.size:,}"
        for one in request.sets
        if counts[one.name].total != one.size
    ]
    if parts:
        listed = ", ".join(parts)
        yield f"samples of the published test sets ({listed}): read the 95 % interval under each number"
    if found.too_long:
        listed = ", ".join(f"{name} {count:,} of {counts[name].total:,}" for name, count in found.too_long.items())
        yield f"records whose prompt leaves no room for an answer count as wrong ({listed})"
    if request.mode == "fast":
        yield "fast mode compares the likelihoods of options; the published numbers are for generated answers"
    yield "published rows are for 7B and 8B models fine-tuned on 170k records; repetitions differ by several points"


def found_to_json(found: CommonsenseFound, request: CommonsenseRequest) -> dict[str, Any]:
    """JSON values. Accuracies from 0 to 1; published ones in per cent, as printed."""
    method: dict[str, Any] = {"mode": request.mode, "template": request.template, "max_samples": request.max_samples}
    if request.mode == "published":
        method |= {"beams": BEAMS, "new_tokens": NEW_TOKENS, "sampling": False}
    sides = {}
    for side, scores in found.scores.items():
        mean, error = average(list(scores.values()))
        sides[side] = {
            "label": found.labels[side],
            "sets": {one.name: _score(scores[one.name], one) for one in request.sets},
            "average": {
                "accuracy": mean,
                "standard_error": error,
                "interval_95": list(average_interval(list(scores.values()))),
            },
        }
    return {
        **method,
        "sides": sides,
        "files": [str(file) for file in found.files],
        "cautions": list(cautions(found, request)),
        "published": [asdict(row) for row in PUBLISHED],
    }


def _score(score: Score, one: AnswerSet) -> dict[str, Any]:
    return {
        "correct": score.correct,
        "total": score.total,
        "accuracy": score.accuracy,
        "standard_error": score.standard_error,
        "interval_95": list(score.interval),
        "published_test_size": one.size,
    }
