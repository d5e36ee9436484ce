"""Views of a run as plain values for the report's template: figures with units, tables, the audit, commands.

Each view is made separately; one with damaged data is replaced by a sentence.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot.config.schema import OptimConfig
from surefoot.config.yaml_reader import parse_yaml
from surefoot.report import curves, footer
from surefoot.report.expert_load import COLUMNS, load_rows
from surefoot.report.journal import Record
from surefoot.report.pictures.plots import EVAL_LOSS, EVAL_REWARD, REWARD, evaluates_rewards, evenly
from surefoot.report.profile import ProfileReport, headline, notes, operator_rows, part_rows
from surefoot.report.record import IN_PYTHON, MEMORY_BEFORE, RunRecord
from surefoot.report.results import STEP_RATE
from surefoot.report.status import Status, duration, progress
from surefoot.report.tables.plan import COVERAGE, choice_rows, coverage_rows, memory_rows
from surefoot.report.trainer_log import Row
from surefoot.report.wording import duration_text, shortened
from surefoot.system.errors import InputError
from surefoot.system.messages import size_text
from surefoot.training.failure_names import newest_failure

T = TypeVar("T")
_MOST_EVENTS = 200
_MOST_SAMPLE_STEPS = 6
_MOST_TEXT = 4000  # characters of one answer
_TABLE_ROWS = 40
_MARKS = 400  # of each kind, on a curve
_MOST_ANSWERS, _MOST_CELL = 4, 600  # answers of a kind in a rollout's table; characters of one
_ANSWER_COLUMNS = ("answers", "score", "rewards", "prompt", "answer", "tokens")
_LOWER = 10  # factor for the learning rate after a divergence; a smaller change may diverge as well


@dataclass(frozen=True)
class Figure:
    """A headline number. note: a short addition in small type."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of plain texts.

    columns: headings.
    numeric: whether all columns but the first hold right-aligned numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: bool = False


def guarded(what: str, make: Callable[[], T], otherwise: T, cautions: list[str]) -> T:
    """Return the view, or `otherwise` and a caution if the files hold something unexpected."""
    try:
        return make()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        cautions.append(f"{what} is left out: its file holds something unexpected ({type(error).__name__}: {error})")
        return otherwise


def figures(rows: Sequence[Row], status: Status, results: Record, forecast: str = "") -> list[Figure]:
    """The newest value of each measurement. For a finished run these are the figures of all_results.json, as in the
    last lines on the terminal: mean training loss, evaluation of the published step, time of the run and of its steps.

    results: all_results.json, perhaps of an earlier end if the run goes on.
    forecast: of the memory, see `memory_forecast`.
    """
    if not rows:
        return []
    ended = results if status == "finished" else {}
    done, total = progress(rows)
    share = f"{100 * done / total:.0f} % of {total:,}" if total else ""
    found = [Figure("steps", f"{done:,}", share)]
    train, rollout = _newest(rows, "loss"), _newest(rows, REWARD.key) if evaluates_rewards(rows) else None
    if rollout:  # the loss of a stage with rollouts is near 0 whatever is learned
        first = next(row for row in rows if REWARD.key in row)
        course = (
            f"step {rollout['current_steps']:,}; {_value(first, REWARD.key, '.4g')} at step {first['current_steps']:,}"
        )
        found.append(Figure("reward", _value(rollout, REWARD.key, ".4g"), course))
    elif curves.number(ended.get("train_loss")) is not None:
        found.append(Figure("training loss", _value(ended, "train_loss", ".4g"), "mean over the run"))
    elif train:
        found.append(Figure("training loss", _value(train, "loss", ".4g"), f"step {train['current_steps']:,}"))
    evaluation, place = _newest(rows, "eval_loss"), ""
    if type(ended.get("eval_step")) is int:
        evaluation, place = ended, f"step {ended['eval_step']:,}, published"
    elif evaluation:
        place = f"step {evaluation['current_steps']:,}"
    if evaluation and "eval_loss" in evaluation:
        name = "reward" if evaluates_rewards(rows) and "eval_reward" in evaluation else "loss"
        found.append(Figure(f"evaluation {name}", _value(evaluation, f"eval_{name}", ".4g"), place))
        if "eval_accuracy" in evaluation:
            found.append(Figure("accuracy", _value(evaluation, "eval_accuracy", ".1%"), "of evaluation tokens"))
    speed = _newest(rows, "throughput")
    # The second for older runs.
    rate = next((key for key in (STEP_RATE, "train_tokens_per_second") if key in ended), "")
    if rate and curves.number(ended[rate]) is not None:
        over = "updates alone, without rollouts" if evaluates_rewards(rows) else "mean over all steps"
        found.append(Figure("tokens per second", _value(ended, rate, ",.0f"), over))
    elif speed:
        found.append(Figure("tokens per second", _value(speed, "throughput", ",.0f"), _supervised(speed)))
    memory = _newest(rows, "peak_memory")
    if memory and (size := curves.number(memory["peak_memory"])) is not None:
        found.append(Figure("peak memory", size_text(int(size)), forecast))
    left = rows[-1].get("remaining_time") if status == "running" else None
    whole, steps = (curves.number(ended.get(key)) for key in ("whole_runtime", "steps_runtime"))
    seconds = curves.number(ended.get("train_runtime")) if whole is None else whole
    if time := duration(rows) if seconds is None else duration_text(seconds):
        note = f"{duration_text(steps)} in steps" if steps is not None else ""
        found.append(Figure("time", time, f"{left} left" if isinstance(left, str) else note))
    return found


def value_table(rows: Sequence[Row]) -> Table:
    """The curves as numbers: evenly spaced train rows, all non-finite ones, evaluations."""
    train = [row for row in rows if "loss" in row]
    evaluations = {row["current_steps"]: row for row in rows if "eval_loss" in row}
    bad = [row for row in train if curves.number(row["loss"]) is None]
    steps = {row["current_steps"]: row for row in (*evenly(train, _TABLE_ROWS), *evenly(bad, _TABLE_ROWS // 4))}
    shown = sorted({*steps, *evenly(list(evaluations), _TABLE_ROWS)})
    what = "reward" if evaluates_rewards(rows) else "loss"
    columns = (
        *([("reward", steps, REWARD.key, ".4g")] if what == "reward" else []),
        ("loss", steps, "loss", ".4g"),
        (f"evaluation {what}", evaluations, f"eval_{what}", ".4g"),
        ("learning rate", steps, "lr", ".3g"),
        ("gradient norm", steps, "grad_norm", ".3g"),
        ("tok/s", steps, "throughput", ",.0f"),
    )
    lines = tuple((f"{step:,}", *(_cell(of.get(step), key, form) for _, of, key, form in columns)) for step in shown)
    return Table(("step", *(name for name, *_ in columns)), lines, numeric=True)


def event_list(events: Sequence[Record]) -> tuple[list[Record], int]:
    """The newest events, newest first, and the number of older ones left out."""
    shown = [
        {
            "kind": str(event.get("kind", "")),
            "step": event["step"],
            "time": _clock(event.get("time")),
            "text": str(event.get("text", "")),
        }
        for event in reversed(events[-_MOST_EVENTS:])
    ]
    return shown, max(0, len(events) - _MOST_EVENTS)


def marks(events: Sequence[Record], rows: Sequence[Row]) -> list[Record]:
    """Events to mark on the first chart, at most `_MARKS` of each kind, spread evenly. A best evaluation carries its
    value there: its loss or reward."""
    key = (EVAL_REWARD if evaluates_rewards(rows) else EVAL_LOSS).key
    values = {row["current_steps"]: curves.number(row[key]) for row in rows if key in row}
    kinds = dict.fromkeys(str(event.get("kind", "")) for event in events)
    return [
        {"kind": kind, "step": step} | ({"value": values.get(step)} if kind == "best" else {})
        for kind in kinds
        for step in evenly(sorted({event["step"] for event in events if event.get("kind") == kind}), _MARKS)
    ]


def sample_groups(samples: Sequence[Record]) -> tuple[list[dict[str, Any]], int]:
    """Samples by step, newest first, always with the first evaluation's; and the number of steps left out."""
    steps: dict[int, list[dict[str, str]]] = {}
    for sample in samples:
        pair = {name: shortened(str(sample.get(name, "")), _MOST_TEXT) for name in ("prompt", "answer")}
        steps.setdefault(sample["step"], []).append(pair)
    order = sorted(steps, reverse=True)
    kept = order if len(order) <= _MOST_SAMPLE_STEPS else [*order[: _MOST_SAMPLE_STEPS - 1], order[-1]]
    return [{"step": step, "pairs": steps[step]} for step in kept], len(order) - len(kept)


def answer_tables(answers: Sequence[Record]) -> list[tuple[str, Table]]:
    """The best, worst and lost answers of the last and of the first rollout, each with its rewards."""
    steps = sorted({one["step"] for one in answers})
    found: list[tuple[str, Table]] = []
    for step in dict.fromkeys((*steps[-1:], *steps[:1])):
        own = [one for one in answers if one["step"] == step]
        scored = sorted(
            (one for one in own if curves.number(one.get("score")) is not None), key=lambda one: -one["score"]
        )
        parts = {
            "best": scored[:_MOST_ANSWERS],
            "worst": scored[max(_MOST_ANSWERS, len(scored) - _MOST_ANSWERS) :],
            "without a score": [one for one in own if one.get("score") is None][:_MOST_ANSWERS],
        }
        rows = tuple(_answer_row(name, one) for name, some in parts.items() for one in some)
        found.append((f"Rollout of step {step:,}: {len(own):,} answers", Table(_ANSWER_COLUMNS, rows)))
    return found


def _answer_row(name: str, one: Record) -> tuple[str, ...]:
    score = curves.number(one.get("score"))
    said = [
        f"{label}: {part.get('outcome') or format(part['score'], '.4g')}"
        + (f", {part['reason']}" if part.get("reason") else "")
        for label, part in one["rewards"].items()
    ]
    turns = one.get("turns")
    answer = " → ".join(map(str, turns)) if isinstance(turns, list) else str(one.get("answer", ""))
    texts = (shortened(text, _MOST_CELL) for text in (str(one.get("prompt", "")), answer))
    return (name, "" if score is None else f"{score:.4g}", "; ".join(said), *texts, str(one.get("tokens", "")))


def plan_tables(record: RunRecord) -> dict[str, Table]:
    """Choices, coverage and memory of the plan, by their names on the page; empty without a plan."""
    plan = record.plan
    return {
        "plan": Table(("choice", "value", "by", "why"), tuple(choice_rows(plan)) if plan else ()),
        "coverage": Table(COVERAGE, tuple(coverage_rows(plan)) if plan else (), numeric=True),
        "memory": Table(("memory", "forecast", "remark"), tuple(memory_rows(plan)) if plan else ()),
    }


def memory_forecast(record: RunRecord) -> str:
    """What the plan expected of the first rank and, on a CPU, the process's memory before the models were loaded. On a
    GPU the libraries are in neither number."""
    if record.plan is None:
        return ""
    ranks = record.environment.get("ranks") or [{}]
    before = ranks[0].get(MEMORY_BEFORE)
    beside = f" + {size_text(before)} before the model" if before else ""
    return f"forecast {size_text(record.plan.memory.total)}{beside}"


def expert_load(record: RunRecord) -> Table:
    """The table of expert loads; empty for dense models."""
    return Table(COLUMNS, tuple(load_rows(record.expert_load.get("tokens", {}))), numeric=True)


def results(record: RunRecord) -> Table:
    rows = tuple((_spoken(key), _result(key, value)) for key, value in record.results.items() if value is not None)
    return Table(("figure", "value"), rows, numeric=True)


@dataclass(frozen=True)
class ProfileView:
    """A profile for the page.

    picture: a PNG in base64, or empty.
    notes: sentences below the tables.
    """

    headline: str
    picture: str
    parts: Table
    operators: Table
    notes: tuple[str, ...]


def profile(record: RunRecord) -> ProfileView | None:
    """The profile of `surefoot train --profile`; None if the run has none."""
    if not record.profile:
        return None
    report = ProfileReport.from_json(record.profile)
    picture = record.profile_picture if record.profile_picture.startswith(b"\x89PNG") else b""
    return ProfileView(
        headline(report),
        base64.b64encode(picture).decode(),
        Table(("part", "ms per step", "share", "of the limit"), tuple(part_rows(report)), numeric=True),
        Table(("operator", "ms per step", "share", "calls"), tuple(operator_rows(report)), numeric=True),
        tuple(notes(report)),
    )


def environment(record: RunRecord) -> Table:
    facts = record.environment
    device = facts.get("device") or {}
    rows = [
        ("device", f"{device.get('kind', '')} · {device.get('name', '')}".strip(" ·")),
        ("memory", size_text(device["memory"]) if isinstance(device.get("memory"), int) else ""),
        ("system", " ".join(str(facts.get(key, "")) for key in ("system", "machine"))),
        ("CPU", str(facts.get("cpu", ""))),
        ("threads", str(facts.get("threads", ""))),
        *((f"{name} version", str(version)) for name, version in (facts.get("versions") or {}).items()),
        *((name, str(value)) for name, value in (facts.get("environment") or {}).items()),
    ]
    return Table(("what", "value"), tuple((name, value) for name, value in rows if value.strip()) if facts else ())


def commands(record: RunRecord, status: Status) -> list[tuple[str, str]]:
    """(purpose, command) pairs; each works when pasted in the folder where the run was started."""
    run = record.run
    if status == "finished" and record.plan is not None and record.plan.reward is not None:
        return footer.next_commands(run, scores=True, **_to_try(record))
    if status == "finished":
        again = _train(run / "config.yaml", record.verified.get(IN_PYTHON, ()), f"output={run}-again")
        return [*footer.next_commands(run, **_to_try(record)), ("train it again", again)]
    if status == "running":
        return [("watch it", f"surefoot board {shlex.quote(str(run.parent))}")]
    verify = f"surefoot verify {shlex.quote(str(run))}"
    return [*_after_failure(record, status), ("check its checkpoints", verify)]


def _after_failure(record: RunRecord, status: Status) -> list[tuple[str, str]]:
    """Commands after a failure. A run that diverged would diverge again from its last checkpoint, so the commands
    replay the step and start a new run with a lower rate; non-finite optimizer moments with finite gradients say
    nothing about the rate. A run with functions of a Python caller continues in Python and cannot be replayed."""
    own = record.verified.get(IN_PYTHON, ())
    found: list[tuple[str, str]] = []
    failure = newest_failure(record.run, _ended_at(record, status)) if status in ("diverged", "failed") else None
    if failure is not None and not own:
        replay = f"surefoot replay {shlex.quote(str(failure))}"
        found.append(("repeat the failed step to find the cause", replay))
    if status != "diverged" or (record.rows and record.rows[-1].get("non_finite") == "moment"):
        found.append(("continue", _train(record.run / "config.yaml", own, resume=True)))
    elif (rate := _lower_rate(record)) is not None:
        lower = (f"optim.lr={rate:.3g}", f"output={record.run}-lower")
        found.append(("train again with a lower learning rate", _train(record.run / "config.yaml", own, *lower)))
    return found


def _ended_at(record: RunRecord, status: Status) -> int:
    """The last step before the run's final event."""
    return next((event["step"] for event in reversed(record.events) if event.get("kind") == status), 0)


def _lower_rate(record: RunRecord) -> float | None:
    """Return the lowered rate, None if the config cannot be read."""
    usual = OptimConfig().lr
    try:
        optim = parse_yaml(record.config, "config.yaml")[0].data.get("optim", {})
    except InputError:
        return None
    rate = curves.number(optim.get("lr", usual)) if isinstance(optim, dict) else None
    return min(rate / _LOWER, usual) if rate and rate > 0 else None


def _train(config: Path, own: Sequence[str], *overrides: str, resume: bool = False) -> str:
    """The command that trains, as typed; in Python if the run had functions from there, which the command lacks.

    own: the arguments with which a Python caller brought them.
    """
    if not own:
        return shlex.join(["surefoot", "train", str(config), *overrides, *(["--resume"] if resume else [])])
    given = [repr(str(config)), *([str(list(overrides))] if overrides else []), *(["resume=True"] if resume else [])]
    return f"surefoot.train({', '.join([*given, *(f'{name}=…' for name in own)])})  # in Python"


def _to_try(record: RunRecord) -> dict[str, Any]:
    """Arguments for the suggested commands, from data.json; empty for earlier versions."""
    found = record.data.get(footer.TO_TRY)
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        return {}
    flags = {name: found.get(name) is True for name in ("texts", "held_out")}
    return {"prompt": found["prompt"], "picture": str(found.get("picture") or ""), **flags}


def _newest(rows: Sequence[Row], key: str) -> Row | None:
    return next((row for row in reversed(rows) if key in row), None)


def _value(row: Row, key: str, form: str) -> str:
    value = curves.number(row[key])
    return "not finite" if value is None else format(value, form)


def _cell(row: Row | None, key: str, form: str) -> str:
    return _value(row, key, form) if row is not None and key in row else ""


def _supervised(row: Row) -> str:
    return f"{_value(row, 'supervised_throughput', ',.0f')} supervised" if "supervised_throughput" in row else ""


def _clock(time: object) -> str:
    """Convert 2026-11-21T11:04:05.123+00:00 to 2026-11-21 11:04:05 UTC."""
    text = str(time or "")
    return f"{text[:10]} {text[11:19]} UTC" if text.endswith("+00:00") else text


def _spoken(key: str) -> str:
    return key.removesuffix("_runtime").replace("_per_second", " per second").replace("_", " ") + (
        " time" if key.endswith("_runtime") else ""
    )


def _result(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("_runtime"):
        return duration_text(value)
    shares = ("accuracy", "exact", "chance")
    if isinstance(value, float) and any(word in key for word in shares) and 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
