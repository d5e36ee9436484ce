"""Findings of `surefoot verify --served` as a table, sentences and faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from surefoot.report.tables.evaluation import four_digits, number_table
from surefoot.system.errors import Fault
from surefoot.system.messages import counted

Verdict = Literal["trained", "base", "neither", "undecided"]


@dataclass(frozen=True)
class Distance:
    """|difference| of log-probabilities of the same tokens, in nats."""

    largest: float
    mean: float


@dataclass(frozen=True)
class FirstDifference:
    """The first token that differs by more than allowed.

    text: its number, from 1.
    token: position in the text, from 0; `shown` is its text.
    served, trained: log-probabilities.
    """

    text: int
    token: int
    shown: str
    served: float
    trained: float


@dataclass(frozen=True)
class Dialogue:
    """A dialogue as formatted by the server and in training.

    turns: number of turns.
    same: whether both agree; None if the server does not say.
    place: the first token that differs.
    served, trained: the text from there on, or the numbers of tokens if the server says no more.
    """

    turns: int
    same: bool | None
    place: int | None = None
    served: str = ""
    trained: str = ""


@dataclass(frozen=True)
class ServedReport:
    """Comparison of a server with the trained model.

    source: of the texts.
    within: the limit that was met: fp32, the 16-bit type, or the requested threshold; empty if none was.
    limit: the widest limit tried, for the largest difference.
    from_trained, from_base, effect, rounding: differences served to trained, served to base, trained to base, and fp32
        to 16 bits of the trained model; None if not measured.
    strength: share of the training's change that is served: 1 all, 0 nothing (least squares); None without a base.
    stops: stop token -> whether it ends an answer on the server.
    """

    verdict: Verdict
    source: str
    texts: int
    tokens: int
    within: str
    limit: float
    from_trained: Distance
    from_base: Distance | None
    effect: Distance | None
    rounding: Distance | None
    strength: float | None
    first: FirstDifference | None
    dialogues: tuple[Dialogue, ...]
    stops: dict[str, bool]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def served_table(report: ServedReport) -> Table:
    """Differences of log-probabilities in nats: the largest, and the mean over all tokens."""
    rows = (
        ("served - trained", report.from_trained),
        ("served - base", report.from_base),
        ("trained - base", report.effect),
        ("fp32 - 16 bits", report.rounding),
    )
    texts = f"{counted(report.texts, 'text')}, {counted(report.tokens, 'token')}"
    return number_table(
        (texts, "largest", "mean"),
        [(name, four_digits(one.largest), four_digits(one.mean)) for name, one in rows if one is not None],
    )


def served_lines(report: ServedReport) -> Iterator[str]:
    """Sentences about what agrees with training; the rest are faults."""
    if report.verdict == "trained":
        strength = "" if report.strength is None else f"; {report.strength:.3f} of what training changed"
        yield f"weights: the served model is the trained one, within {report.within}{strength}"
    unknown = sum(one.same is None for one in report.dialogues)
    if same := sum(bool(one.same) for one in report.dialogues):
        yield f"template: {counted(same, 'dialogue')} as in training"
    if unknown:
        yield f"template: the server does not say how it formats {counted(unknown, 'dialogue')}"
    if ending := [token for token, ends in report.stops.items() if ends]:
        yield f"stop: {', '.join(ending)} ends an answer"


def served_faults(report: ServedReport, where: str) -> list[Fault]:
    """One fault for each of weights, dialogues and stop tokens that differ from training. where: server and model."""
    found = [*_of_weights(report, where)]
    for one in report.dialogues:
        if one.same is False:
            place = "" if one.place is None else f" from token {one.place} on"
            what = (
                f"a dialogue of {counted(one.turns, 'turn')} differs{place}: {one.served!r} on the server, in training"
            )
            fix = "serve with the tokenizer and chat template of the trained model's folder"
            found.append(Fault(where, f"{what} {one.trained!r}", fix, code="SF-SERVED-TEMPLATE"))
    for token, ends in report.stops.items():
        if not ends:
            what = f"{token!r}, which ended answers in training, does not end one on the server"
            fix = "serve with the trained model's generation_config.json, or send it as a stop token with every request"
            found.append(Fault(where, what, fix, code="SF-SERVED-STOP"))
    return found


def _of_weights(report: ServedReport, where: str) -> Iterator[Fault]:
    if report.verdict == "base":
        what = "answers like the BASE model: the training is not applied"
        fix = "name the adapter with --name; if it is named, its keys and the server's modules have different prefixes"
        yield Fault(where, what, fix, code="SF-SERVED-BASE")
    elif report.verdict == "undecided":
        assert report.effect is not None
        what = f"training changed at most {report.effect.largest:.2g} nats, less than {report.within} allows: "
        fix = "serve in fp32, choose --data on which training had an effect, or lower --threshold"
        yield Fault(where, f"{what}trained model and base cannot be distinguished", fix, code="SF-SERVED-UNDECIDED")
    elif report.verdict == "neither":
        what = f"is neither the trained model nor its base within {report.limit:.2g} nats"
        if first := report.first:
            what += f"; first at text {first.text}, token {first.token} {first.shown!r}: {first.served:.4f} served, "
            what += f"{first.trained:.4f} trained"
        if report.strength is not None:
            what += f"; {report.strength:.2f} of the training's change is served"
        fix = "check that the server uses this adapter, its scale and this base, without quantization"
        yield Fault(where, what, fix, code="SF-SERVED-OTHER")
