"""Results of `surefoot evaluate` as tables: losses, rewards, accuracies on several sets, and lm-evaluation-harness.

Numbers have four digits, or a dash if nothing was measured. Shares come with Wilson's interval.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from surefoot.data.audit import Audit
from surefoot.report.calibration import Bin, bins_table
from surefoot.training.report import EvalReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUMBER = 9  # width of a number with four digits, 0.0001234
_COUNTS = 3  # leading columns (a name and counts), which may be narrower


def number_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> Table:
    """left: text columns; the first one is never wrapped. On a narrow screen numbers are not broken."""
    table = Table(box=None, pad_edge=False)
    for place, head in enumerate(heads):
        justify = "left" if place in left else "right"
        least = _NUMBER if place >= _COUNTS else None
        table.add_column(head, justify=justify, overflow="fold", no_wrap=place == 0, min_width=least)
    for row in rows:
        table.add_row(*row)
    return table


def four_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def loss_table(results: Mapping[str, EvalReport]) -> Table:
    """Loss in nats per supervised token, perplexity, accuracy on supervised tokens, seconds."""
    rows = []
    for name, report in results.items():
        accuracy = "" if report.accuracy is None else f"{report.accuracy:.2%}"
        perplexity = "" if report.perplexity is None else f"{report.perplexity:.4g}"
        rows.append((name, f"{report.loss:.5f}", perplexity, accuracy, f"{report.seconds:.1f}"))
    return number_table(("", "loss", "perplexity", "token accuracy", "seconds"), rows)


def loss_lines(audit: Audit, results: Mapping[str, EvalReport], max_length: int) -> Iterator[str]:
    """What was measured on, with cautions."""
    source = audit.source
    yield f"data: {source.file}, {source.layout} records, template {source.template}"
    yield (
        f"{audit.kept:,} examples of {source.used:,} records, {audit.supervised_tokens:,} supervised tokens of "
        f"{audit.tokens:,}, {audit.truncated:,} examples cut at {max_length:,} tokens"
    )
    if source.dropped:
        yield f"caution: {len(source.dropped):,} records have no label within {max_length:,} tokens: not measured"
    if audit.stop_lost:
        yield f"caution: {audit.stop_lost:,} answers were cut, so their stop token was not measured"
    for name, report in results.items():
        if not abs(report.loss) < float("inf"):
            yield f"caution: the loss of the {name} is not finite"


def reward_lines(audit: Audit, found: Mapping[str, Any]) -> Iterator[str]:
    """The data, the results and cautions. found: output of `reward_to_json`."""
    source, data = audit.source, found["data"]
    yield f"data: {source.file}, {source.layout} records, template {source.template}"
    yield f"{data['pairs']:,} pairs of {source.used:,} records, {audit.truncated:,} answers cut"
    if source.dropped:
        yield f"caution: {len(source.dropped):,} records are left out, because an answer is empty or was cut completely"
    low, high = found["accuracy_interval"]
    sure = f"95 % interval {low:.1%} to {high:.1%}"
    yield f"accuracy {found['accuracy']:.1%} ({sure}) · margin {_number(found['margin'])}"
    better, worse = _number(found["score_chosen"]), _number(found["score_rejected"])
    yield f"mean score of the better answers {better}, of the worse {worse}"
    yield f"loss ({found['loss']['kind']}) {_number(found['loss']['value'])}"
    yield f"expected calibration error {_share(found['calibration']['expected_error'])}"


def answers_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The data, how it was answered, and cautions. found: output of `answers_to_json`."""
    data = found["data"]
    yield f"data: {data['file']}, {data['prompts']:,} prompts"
    yield (
        f"one greedy answer to each, and {found['answers']:,} at temperature {found['temperature']:g} "
        f"(seed {found['seed']}); an answer passes with {found['passes']:g}"
    )
    for name, side in found["results"].items():
        if side["without_score"]:
            yield f"caution: {side['without_score']:,} drawn answers of the {name} have no score, and do not count"


def answers_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Of each side the mean reward of the greedy answers, and pass@k with its 95 % interval."""

    def text(chance: Mapping[str, Any]) -> str:
        if chance["interval"] is None:
            return "–"
        low, high = chance["interval"]
        return f"{chance['value']:.1%} ({100 * low:.1f}–{100 * high:.1f})"

    sizes = list(next(iter(results.values()))["pass_at"])
    rows = [
        (name, four_digits(side["reward"]), *(text(side["pass_at"][k]) for k in sizes), f"{side['seconds']:.1f}")
        for name, side in results.items()
    ]
    return number_table(("", "reward", *(f"pass@{k}" for k in sizes), "seconds"), rows)


def calibration_table(bins: Sequence[Bin]) -> Table:
    """The model's confidence compared with how often it was right, by bin."""
    plain = bins_table(bins)
    return number_table(plain.columns, plain.rows)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1%}"


def harness_table(sides: Mapping[str, Mapping[str, Cell]]) -> Table:
    """sides: name -> metric -> value and standard error, as from the harness: shares from 0 to 1."""

    def text(cell: Cell) -> str:
        return f"{cell.accuracy:.4f}" + ("" if cell.error is None else f" ± {cell.error:.4f}")

    names = next(iter(sides.values()))
    rows = [(name, *(text(cells[name]) for cells in sides.values())) for name in names]
    return number_table(("task and metric", *sides), rows)


_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#666666"
_BARS = (_GREY, _BLUE)


@dataclass(frozen=True)
class Cell:
    """A score, as a share from 0 to 1.

    error: standard error.
    interval: 95 %; None if unknown.
    count: "143/200", or empty.
    """

    accuracy: float
    error: float | None = None
    count: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoreRow:
    """One row of a table of scores.

    cells: by column heading.
    average: over these columns, None if it has no meaning.
    measured: measured here, not a published value.
    group: rows of a group share a color in the picture.
    """

    name: str
    cells: Mapping[str, Cell]
    average: Cell | None
    measured: bool
    group: str = ""


def score_table(rows: Sequence[ScoreRow], headings: Sequence[str]) -> Table:
    """Scores in per cent; measured ones with the 95 % interval and the counts below."""
    table = Table(box=None, pad_edge=False)
    table.add_column("accuracy in %")
    averaged = all(row.average is not None for row in rows)
    for heading in (*headings, *(["avg" if len(headings) == 8 else f"avg of {len(headings)}"] if averaged else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, *map(_text, _cells(row, headings)), style="bold" if row.measured else "")
    return table


def _cells(row: ScoreRow, headings: Sequence[str]) -> list[Cell]:
    return [*(row.cells[heading] for heading in headings), *([] if row.average is None else [row.average])]


def _text(cell: Cell) -> str:
    lines = [f"{cell.accuracy:.1%}".removesuffix("%")]
    if cell.interval is not None:
        lines.append("–".join(f"{100 * end:.1f}" for end in cell.interval))
    return "\n".join([*lines, *([cell.count] if cell.count else [])])


def _reach(cell: Cell) -> tuple[float, float]:
    """How far the error bar goes down and up, in per cent."""
    if cell.interval is None:
        return 100 * (cell.error or 0.0), 100 * (cell.error or 0.0)
    low, high = cell.interval
    return max(0.0, 100 * (cell.accuracy - low)), max(0.0, 100 * (high - cell.accuracy))


def draw_scores(rows: Sequence[ScoreRow], headings: Sequence[str], chance: Mapping[str, float], title: str) -> Figure:
    """Draw bars for measured scores, with their 95 % interval or one standard error, and points for published ones.

    chance: the accuracy of guessing, by heading; drawn as dotted lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    columns = [*headings, *(["average"] if rows[0].average is not None else [])]
    measured, published = [row for row in rows if row.measured], [row for row in rows if not row.measured]
    width = 0.55 / len(measured)
    for place, row in enumerate(measured):
        cells = _cells(row, headings)
        left = [column - 0.42 + width * (place + 0.5) for column in range(len(columns))]
        axes.bar(
            left,
            [100 * cell.accuracy for cell in cells],
            width=0.92 * width,
            yerr=list(zip(*map(_reach, cells), strict=True)),
            color=_BARS[place % 2] if len(measured) > 1 else _BLUE,
            error_kw={"elinewidth": 1, "capsize": 2},
            label=row.name,
        )
    shades = {"LoRA": (_ORANGE, "o"), "DoRA": (_GREEN, "D")}
    for group in dict.fromkeys(row.group for row in published):
        color, marker = shades.get(group, (_GREY, "s"))
        of_group = [row for row in published if row.group == group]
        shift = 0.22 if group == "LoRA" else 0.34
        points = [
            (column + shift, 100 * cell.accuracy)
            for row in of_group
            for column, cell in enumerate(_cells(row, headings))
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker, color=color, ms=4.5, alpha=0.75, mec="none", label=f"published, {group}")
    for column, heading in enumerate(headings):
        if (floor := chance.get(heading)) is not None:
            axes.hlines(100 * floor, column - 0.45, column + 0.45, color="black", linestyle=":", linewidth=1)
    if chance:
        axes.plot([], [], ":", color="black", linewidth=1, label="guessing")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    return figure
