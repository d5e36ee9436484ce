"""What the page is sent: all at first, then what is new, and nothing twice after a lost connection."""

from __future__ import annotations

import json

import pytest

from helpers.run_folders import log_more, log_rows, train_row, write_run
from surefoot.commands.board.streams import follow_all, follow_run


def until_quiet(stream):
    """The messages up to the next pause."""
    messages = []
    while (message := next(stream)) is not None:
        messages.append(message)
    return messages


def curves(messages):
    (found,) = [message for message in messages if message.event == "curves"]
    return found


def losses(message):
    return next(line["x"] for line in message.data["charts"][0]["lines"] if line["name"] == "training")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "a", log_rows(300, 900))


def test_first_all_then_what_is_new(run):
    stream = follow_run(run, "")
    first = until_quiet(stream)
    assert {name for message in first if message.event == "parts" for name in message.data} == {
        "head",
        "event-list",
        "sample-list",
    }
    assert not curves(first).data["added"]
    assert losses(curves(first)) == list(range(1, 301))
    assert until_quiet(stream) == []
    log_more(run, [train_row(301, 900, 0.7)])
    second = until_quiet(stream)
    assert curves(second).data["added"]
    assert losses(curves(second)) == [301]
    assert [set(message.data) for message in second if message.event == "parts"] == [{"head"}]


def test_a_browser_that_comes_back_gets_what_it_missed(run):
    last = curves(until_quiet(follow_run(run, ""))).id
    log_more(run, [train_row(step, 900, 0.5) for step in (301, 302)])
    again = curves(until_quiet(follow_run(run, last)))
    assert again.data["added"]
    assert losses(again) == [301, 302]


def test_a_log_that_was_cut_is_sent_anew(run):
    stream = follow_run(run, "")
    last = curves(until_quiet(stream)).id
    log = run / "trainer_log.jsonl"
    other = run / "other"
    other.write_text("".join(log.read_text().splitlines(keepends=True)[:200]))
    other.replace(log)
    for messages in (until_quiet(stream), until_quiet(follow_run(run, last))):
        assert not curves(messages).data["added"]
        assert losses(curves(messages))[-1] < 200


@pytest.mark.parametrize("steps", [20, 250, 256, 460, 512])
def test_the_browser_has_the_whole_curve_at_any_length(tmp_path, steps):
    """Added points behind the picture before them are the picture."""
    run = write_run(tmp_path / "a", log_rows(steps, 900))
    stream = follow_run(run, "")
    had = losses(curves(until_quiet(stream)))
    for step in range(steps + 1, steps + 12):
        log_more(run, [train_row(step, 900, 0.5)])
        message = curves(until_quiet(stream))
        had = [*had, *losses(message)] if message.data["added"] else losses(message)
        assert had == list(range(1, step + 1))


def test_a_first_evaluation_brings_a_new_picture(tmp_path):
    run = write_run(tmp_path / "a", log_rows(300, 900, evaluate=1000))
    stream = follow_run(run, "")
    until_quiet(stream)
    log_more(run, log_rows(301, 900, evaluate=301)[-1:])
    assert not curves(until_quiet(stream)).data["added"]


def test_the_overview_is_sent_when_a_row_of_it_changes(run):
    stream = follow_all(run.parent, "")
    (first,) = until_quiet(stream)
    assert "300 / 900" in first.data["runs"]
    assert until_quiet(stream) == []
    assert until_quiet(follow_all(run.parent, first.id)) == []
    log_more(run, [train_row(301, 900, 0.7)])
    (second,) = until_quiet(stream)
    assert "301 / 900" in second.data["runs"]
    assert second.id != first.id


def test_a_message_is_one_event(run):
    for message in until_quiet(follow_run(run, "")):
        text = message.encode().decode()
        assert text.endswith("\n\n")
        assert text.count("\n\n") == 1
        data = next(line for line in text.splitlines() if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: ")) == message.data
