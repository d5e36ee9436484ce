"""The line that users read most, part by part; and what the bar shows when there is little room."""

import dataclasses
import io
import re

import pytest

from helpers.faults import gives
from surefoot.report import wording
from surefoot.report.console import Console
from surefoot.report.pace import Timing
from surefoot.report.progress import Progress, is_logged
from surefoot.report.wording import (
    duration_text,
    eta_text,
    eval_fields,
    eval_sentence,
    fitted,
    number,
    sample_text,
    skip_sentence,
    step_line,
)
from surefoot.system.messages import size_text
from surefoot.training.report import EvalReport, StepReport

TIMING = Timing(elapsed=60.0, remaining=41.0, throughput=3512.4, supervised_throughput=411.2, peak_memory=1_200_000_000)
STEP = StepReport(120, 1.234, 0.42, 9.1e-05, 411, 3512, (3, 17), "stepped", None, 1.0)
EVALUATION = EvalReport(step=100, loss=1.301, perplexity=3.673, accuracy=0.612, weight=4012, seconds=2.1)
SKIPPED = dataclasses.replace(STEP, loss=None, grad_norm=None, decision="non_finite", non_finite="loss")


def plain(total=1000, **changes):
    stream = io.StringIO()
    return Progress(Console(stream), total, **changes), stream


def live(width, total=1000):
    stream = io.StringIO()
    return Progress(Console(stream, live=True, width=width), total), stream


def last_picture(stream):
    """What stands on the screen at the end, without the codes that put it there: the bar, and the numbers below it."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()]
    start = max(place for place, line in enumerate(lines) if "/1000 · " in line)
    return lines[start], lines[start + 1 :]


def numbers(line):
    """Of each part of a line, its numbers."""
    return [re.findall(r"\d[\d,.:/e-]*", part) for part in line.split(" · ")]


def test_a_step_in_one_line():
    progress, stream = plain()
    progress.evaluation(EVALUATION, improved=True)
    progress.step(STEP, TIMING)
    evaluation, step = stream.getvalue().splitlines()
    assert numbers(evaluation) == [["100:", "1.301"], ["3.673"], ["61.2", "4,012"], ["2.1"], []]  # the best so far
    assert numbers(step) == [["120/1000"], ["1.234"], ["9.1e-05"], ["0.420"], ["3,512"], ["00:41"], []]
    assert step.endswith(" ok")
    progress.evaluation(EVALUATION)  # twin: it is not
    assert numbers(stream.getvalue().splitlines()[-1]) == numbers(evaluation)[:-1]


def test_the_log_has_all_of_a_line_and_a_wide_terminal_too(tmp_path):
    console = Console(io.StringIO())
    console.log_to(tmp_path / "run.log")
    progress = Progress(console, 1000)
    progress.evaluation(EVALUATION, improved=True)
    progress.step(STEP, TIMING)
    lines = [numbers(line.partition(" ")[2]) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert lines == [
        [["100:", "1.301"], ["3.673"], ["61.2", "4,012"], ["2.1"], []],
        [["120/1000"], ["1.234", "1.301", "100"], ["9.1e-05"], ["0.420"], ["3,512", "411"], ["1.1"], ["00:41"], []],
    ]


def test_every_line_in_a_pipe_has_the_same_fields(monkeypatch):
    """Though a number is longer in one of them, and though there has been an evaluation."""

    def fields():
        progress, stream = plain()
        progress.step(STEP, TIMING)
        progress.evaluation(EVALUATION)
        progress.step(dataclasses.replace(STEP, step=999, lr=0.000123, loss=123.4), TIMING)
        first, _, later = stream.getvalue().splitlines()
        return [re.sub(r"\d[\d,.:/e-]*", "N", line) for line in (first, later)]

    first, later = fields()
    assert first == later
    assert first.count("N") == 6
    monkeypatch.setattr(wording, "_DETAIL", 9)  # twin: the last evaluation is shown as well
    first, later = fields()
    assert first != later


def test_what_another_tools_line_tells_is_not_told_again():
    progress, stream = plain()
    progress.step(STEP, TIMING, told=True)
    progress.evaluation(EVALUATION, told=True)
    assert stream.getvalue() == ""
    progress.step(STEP, TIMING)  # twin
    progress.evaluation(EVALUATION)
    assert len(stream.getvalue().splitlines()) == 2


PAIRS = {"reward_accuracy": 0.6, "reward_margin": 0.0145, "reward_chosen": -0.008207, "reward_rejected": -0.005399}
PPO = {"reward": 0.009149, "kl": 0.0141}


@pytest.mark.parametrize(("metrics", "kept", "left_out"), [(PAIRS, "accuracy", "margin"), (PPO, "reward", "kl")])
def test_what_a_method_is_about_is_the_last_of_its_numbers_to_go(metrics, kept, left_out, monkeypatch):
    report = dataclasses.replace(STEP, loss=-0.002053, metrics=metrics)
    fields = step_line(report, 1000, TIMING, "ok", None)
    assert kept in fitted(fields, 80)
    assert left_out not in fitted(fields, 80)
    assert gives(fields[1].text, metrics.get("reward", report.loss))  # where answers are drawn, their reward leads
    turned = {name: metrics[name] for name in reversed(metrics)}  # in whatever order they were summed up
    evaluation = dataclasses.replace(EVALUATION, perplexity=None, accuracy=None, metrics=turned)
    assert f"{kept} " in fitted(eval_fields(evaluation, True), 80)
    monkeypatch.setattr(wording, "_SHOWN", wording._SHOWN[::-1])  # twin: their order is what decides
    assert kept not in fitted(step_line(report, 1000, TIMING, "ok", None), 80)


def test_an_evaluation_of_rewards_gives_the_reward_and_not_minus_it():
    found = dataclasses.replace(EVALUATION, perplexity=None, accuracy=None, metrics={"reward": 0.25}, loss=-0.5)
    of_answers = dataclasses.replace(found, unit="response_tokens")
    first, *others = numbers(eval_sentence(of_answers, False))
    assert first == ["100:", "0.25"]
    assert others == [["4,012"], ["2.1"]]
    assert numbers(eval_sentence(found, False))[0] == ["100:", "0.5"]  # twin: it is known by its unit


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_line_has_no_more_columns_than_there_are(width):
    metrics = {"reward_accuracy": 0.612, "reward_margin": 0.123, "reward": 1.25, "kl": 0.125}
    report = dataclasses.replace(STEP, step=98_120, metrics=metrics)
    fields = step_line(report, 100_000, TIMING, "ok (3 skipped)", EVALUATION)
    line, whole = fitted(fields, width), fitted(fields)
    assert len(line) <= max(width, 71)  # what every line has: step, loss, gradient and the guard's word
    assert len(whole) > 140
    assert [value for value in ("98120/100000", "1.234", "0.420", 3) if not gives(line, value)] == []


def test_a_step_that_was_held_back_says_why_and_invents_no_number():
    progress, stream = plain()
    held = dataclasses.replace(STEP, loss=None, grad_norm=None, decision="held", held="unmeasured")
    progress.step(held, TIMING)
    progress.step(dataclasses.replace(STEP, decision="held", held="ratio 12 is above 10"), TIMING)
    progress.step(dataclasses.replace(held, non_finite="loss"), TIMING)  # the twin: what is not finite stays visible
    unmeasured, measured, unfit = stream.getvalue().splitlines()
    assert numbers(unmeasured) == [["120/1000"], ["9.1e-05"], ["3,512"], ["00:41"], []]  # neither loss nor gradient
    assert unmeasured.endswith(" unmeasured")
    assert numbers(measured)[1] == ["1.234"]
    assert measured.endswith(" ratio 12 is above 10")
    assert numbers(unfit)[1] == []


def test_a_skipped_step_is_an_event_and_a_state():
    progress, stream = plain(log_every=50)
    progress.step(SKIPPED, TIMING, consecutive=2, skipped=3)
    progress.step(dataclasses.replace(STEP, step=150), TIMING, consecutive=0, skipped=3)
    event, line, after = stream.getvalue().splitlines()
    assert all(gives(event, value) for value in (120, "loss", 2, 3, 17))
    assert numbers(line)[1] == []
    assert (numbers(line)[-1], numbers(after)[-1]) == (["2"], ["3"])


def test_a_loss_scale_that_falls_is_no_alarm():
    progress, stream = plain()
    report = dataclasses.replace(STEP, decision="scaler", grad_norm=None, non_finite="grad_norm", scale=65536.0)
    progress.step(report, TIMING)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(" scaler")


@pytest.mark.parametrize(
    ("step", "expected"), [(1, True), (2, True), (10, True), (11, False), (19, False), (20, True), (25, True)]
)
def test_log_every(step, expected):
    report = dataclasses.replace(STEP, step=step)
    assert is_logged(report, 25, 10) is expected
    assert is_logged(dataclasses.replace(SKIPPED, step=step), 25, 10)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_the_bar_keeps_place_and_state_at_any_width(width):
    progress, stream = live(width)
    progress.step(STEP, TIMING)
    progress.close()
    bar, (line,) = last_picture(stream)
    assert numbers(bar) == [["120/1000"], ["00:41"], []]
    assert bar.rstrip().endswith(" ok")
    whole = [["1.234"], ["9.1e-05"], ["0.420"], ["3,512", "411"], ["1.1"]]
    assert (numbers(line) == whole) == (width >= 100)
    assert max(len(bar), len(line)) <= width


def test_the_bar_says_what_the_run_is_busy_with():
    progress, stream = live(100)
    progress.step(STEP, TIMING)
    with progress.during("evaluating"):
        assert "evaluating" in last_picture(stream)[0]
    assert "training" in last_picture(stream)[0]
    progress.close()


def test_on_a_terminal_steps_go_to_the_log_and_events_to_both(tmp_path):
    stream = io.StringIO()
    console = Console(stream, live=True, width=100)
    console.log_to(tmp_path / "run.log")
    progress = Progress(console, 1000)
    progress.step(STEP, TIMING)
    progress.event("saved checkpoint-120")
    progress.close()
    log = (tmp_path / "run.log").read_text()
    assert "step 120/1000" in log
    assert "saved checkpoint-120" in log
    assert "\x1b" not in log
    assert "step 120/1000" not in stream.getvalue()
    assert "saved checkpoint-120" in stream.getvalue()


def test_redrawing_is_limited_in_time():
    now = [0.0]
    stream = io.StringIO()
    progress = Progress(Console(stream, live=True, width=100), 1000, clock=lambda: now[0])
    sizes = []
    for step in range(1, 101):
        now[0] += 0.01
        progress.step(dataclasses.replace(STEP, step=step), TIMING)
        sizes.append(len(stream.getvalue()))
    assert len(set(sizes)) <= 12  # one second, ten pictures
    progress.close()
    assert "100/1000" in last_picture(stream)[0]
    progress.close()


@pytest.mark.parametrize(
    ("make", "value", "text"),
    [
        (number, 1.2, "1.200"),
        (number, 0.0003124, "0.0003124"),
        (number, 12345.6, "1.235e+04"),
        (number, 1234.0, "1234"),
        (number, None, "not finite"),
        (size_text, 999, "999 B"),
        (size_text, 0, "0 B"),
        (size_text, 3 * 2**19, "1.5 MiB"),
        (size_text, 320 * 2**20, "320 MiB"),
        (size_text, -3 * 2**29, "-1.5 GiB"),
        (size_text, 3 * 2**39, "1.5 TiB"),
        (eta_text, 41.9, "00:41"),
        (eta_text, 7265.0, "2:01:05"),
        (duration_text, 4.25, "4.2 s"),
        (duration_text, 59.7, "1 min 00 s"),
        (duration_text, 725, "12 min 05 s"),
        (duration_text, 11_250, "3 h 07 min"),
    ],
)
def test_numbers_with_units(make, value, text):
    assert make(value) == text


def test_long_lists_and_texts_say_what_they_leave_out():
    many = dataclasses.replace(SKIPPED, examples=tuple(range(64)), non_finite="grad_norm")
    assert re.findall(r"\d+", skip_sentence(many, 1)) == ["120", "1", *map(str, range(8)), "56"]
    head, prompt, answer, cut = sample_text(100, "What?", "a\nb" + "c" * 500).splitlines()
    assert gives(head, 100)
    assert (prompt.split()[-1], answer.split()[-1]) == ("What?", "a")
    assert gives(cut, 103)
