"""What the page is sent: all at first, then what changed."""

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
    stream = follow_run(run)
    first = until_quiet(stream)
    (parts,) = [message.data for message in first if message.event == "parts"]
    assert set(parts) == {"head", "event-list", "sample-list"}
    assert losses(curves(first)) == list(range(1, 301))
    assert until_quiet(stream) == []
    log_more(run, [train_row(301, 900, 0.7)])
    second = until_quiet(stream)
    assert losses(curves(second)) == list(range(1, 302))
    assert [set(message.data) for message in second if message.event == "parts"] == [{"head"}]


def test_a_log_that_was_cut_is_sent_as_it_is_now(run):
    stream = follow_run(run)
    until_quiet(stream)
    log = run / "trainer_log.jsonl"
    other = run / "other"
    other.write_text("".join(log.read_text().splitlines(keepends=True)[:200]))
    other.replace(log)
    assert losses(curves(until_quiet(stream)))[-1] < 200


def test_the_overview_is_sent_when_a_row_of_it_changes(run):
    stream = follow_all(run.parent)
    (first,) = until_quiet(stream)
    assert "300 / 900" in first.data["runs"]
    assert until_quiet(stream) == []
    log_more(run, [train_row(301, 900, 0.7)])
    (second,) = until_quiet(stream)
    assert "301 / 900" in second.data["runs"]


def test_a_message_is_one_event(run):
    for message in until_quiet(follow_run(run)):
        text = message.encode().decode()
        assert text.endswith("\n\n")
        assert text.count("\n\n") == 1
        data = next(line for line in text.splitlines() if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: ")) == message.data
