"""The loop of turns over an engine that draws by script: ids as they were drawn, limits, and environments that fail."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoTokenizer

import surefoot
from helpers.faults import raises_fault
from surefoot.config.methods import EnvironmentTerm
from surefoot.data.chat.templates import make_template
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.data.tokenize.turns import TurnMarks
from surefoot.methods import waiting
from surefoot.methods.environments import calls
from surefoot.methods.environments.multi_turn import MultiTurn, TurnRequest
from surefoot.methods.environments.opened import Environment, open_environment
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.environments.replies import Reply, reply_of
from surefoot.methods.waiting import WaitReporter
from surefoot.models.generate import Decoding
from surefoot.models.rollout import Rollout
from surefoot.report import journal
from surefoot.system.errors import EnvironmentFault, Fault, InputError

BASE = Path(surefoot.__file__).parent / "commands" / "quickstart" / "base"
LIMIT, STOP = 40, 1908
SECONDS = 0.3  # of a call that is to be too late


class Engine:
    """Draws ids at random, as a tokenizer would never write them; remembers what it was asked and what it drew."""

    def __init__(self, seed: int = 0, stops: float = 0.9):
        self.seed, self.stops = seed, stops
        self.seen: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def answer(self, prompts, decoding, places=None, limits=None):
        found = []
        for prompt, place, limit in zip(prompts, places, limits, strict=True):
            draw = random.Random(f"{self.seed} {decoding.seed} {place}")
            ids = tuple(draw.randrange(1900) for _ in range(draw.randint(1, 6)))
            stopped = len(ids) < limit and draw.random() < self.stops
            ids = (*ids, STOP) if stopped else (ids * LIMIT)[:limit]
            self.seen.setdefault(place, []).append((tuple(prompt), ids))
            found.append(Rollout(tuple(prompt), ids, stopped, tuple(-draw.random() for _ in ids)))
        return found


class Counting:
    """Answers with the number of its turn; a reward for each, and an end after `turns`."""

    made, turns = 0, 3

    def __init__(self):
        type(self).made += 1

    def reset(self, record, seed):
        self.count = 0
        self.seed = seed

    def step(self, answer):
        self.count += 1
        if self.count == self.turns:
            return {"reward": 1, "done": True}
        return {"observation": f"{self.count} of {len(answer)}", "reward": 0.5}


def environment_of(kind: type) -> Environment:
    """As `open_environment` makes one of a class in a file."""
    from surefoot.methods.environments import opened

    kind.made = 0
    return Environment("own.py:Own", "user", lambda: opened._PythonEpisode(kind(), "own.py:Own", "user"), "own")


@pytest.fixture(scope="module")
def marks() -> TurnMarks:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    encoder = TextEncoder(tokenizer)
    return TurnMarks(make_template("tokenizer", encoder, (STOP,)), encoder, tokenizer.bos_token_id)


class World:
    """Prompts to answer in turns, over and over."""

    def __init__(self, marks: TurnMarks, folder: Path, kind: type, *, turns: int = 4, seconds: float = 30.0):
        self.told: list[str] = []
        self.anywhere = bool  # of the only rank
        self.marks, self.folder, self.turns, self.seconds = marks, folder, turns, seconds
        self.environment = environment_of(kind)

    def hold(
        self, engine: Engine, count: int = 6, *, seed: int = 5, step: int = 1, limit: int = LIMIT, needed: bool = True
    ):
        def notify(sentence, *, caution=True):
            self.told.append(sentence)

        multi_turn = MultiTurn(
            self.environment,
            self.marks,
            self.marks.encoder.tokenizer,
            self.turns,
            self.seconds,
            Recorded(self.folder, 0, 0),
            self.anywhere,
            WaitReporter(notify),
            notify,
        )
        places = range(count)
        asked = TurnRequest([(1, 2, 3)] * count, [{"n": one} for one in places], list(places), [7] * count, places)
        return multi_turn.converse(
            engine, asked, Decoding(limit, frozenset({STOP}), 0, 1.0, seed=seed), step, needed=needed
        )


def check_ids(heard, engine: Engine) -> None:
    """The ids that are learned from are those that the engine saw and drew, at every turn."""
    for place, answer in enumerate(heard.answers):
        whole, end = (*answer.prompt, *answer.response), len(answer.prompt)
        drawn = answer.stretches[::2]
        assert [ids for _, ids in engine.seen[place]] == list(drawn)
        for number, (seen, ids) in enumerate(engine.seen[place]):
            end += sum(len(one) for one in answer.stretches[2 * number - 1 : 2 * number])
            assert whole[:end] == seen
            end += len(ids)
        assert end == len(whole)
        assert len(answer.logprobs) == answer.drawn == sum(map(len, drawn))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_learned_from_is_what_the_engine_saw_and_drew(marks, tmp_path, seed):
    engine = Engine(seed)
    heard = World(marks, tmp_path, Counting).hold(engine, 12)
    check_ids(heard, engine)
    assert all(len(one.response) <= LIMIT for one in heard.answers)
    assert any(len(one.pieces) > 1 for one in heard.answers)


def test_twin_text_made_into_ids_again_is_other_ids(marks, tmp_path):
    engine = Engine()
    heard = World(marks, tmp_path, Counting).hold(engine)
    tokenizer = marks.encoder.tokenizer
    again = [
        Rollout(one.prompt, tuple(tokenizer(tokenizer.decode(one.response))["input_ids"]), True, one.logprobs, None)
        for one in heard.answers
    ]
    with pytest.raises(AssertionError):
        check_ids(type(heard)(again), engine)


def test_rewards_of_the_turns_are_added(marks, tmp_path):
    heard = World(marks, tmp_path, Counting).hold(Engine(stops=1.0), limit=400)
    assert [one.value for one in heard.scores] == [2.0] * 6
    assert all(one.stopped for one in heard.answers)
    assert heard.sums["turns"] == 18


@pytest.mark.parametrize(
    ("turns", "limit", "stops", "name"), [(2, 400, 1.0, "over_turns"), (4, 12, 0.0, "over_tokens")]
)
def test_limits_end_an_answer_without_an_end(marks, tmp_path, turns, limit, stops, name):
    heard = World(marks, tmp_path, Counting, turns=turns).hold(Engine(stops=stops), limit=limit)
    assert heard.sums[name] == 6
    assert not any(one.stopped for one in heard.answers)
    assert {"over_turns", "over_tokens"} - {name} == {
        one for one in ("over_turns", "over_tokens") if not heard.sums[one]
    }


def test_what_leaves_no_room_is_not_given(marks, tmp_path):
    class Long(Counting):
        def step(self, answer):
            return "word " * 60

    heard = World(marks, tmp_path, Long).hold(Engine(stops=1.0))
    assert all(one.pieces == () and not one.stopped for one in heard.answers)
    assert heard.sums["over_tokens"] == 6


def test_what_is_said_first_is_part_of_the_prompt_and_takes_of_its_room(marks, tmp_path):
    class Opening(Counting):
        def reset(self, record, seed):
            super().reset(record, seed)
            return f"number {record['n']} of {seed}"

    world, engine = World(marks, tmp_path, Opening), Engine()
    prompt = tuple(
        marks.encoder.tokenizer.apply_chat_template([{"role": "user", "content": "Go."}], add_generation_prompt=True)[
            "input_ids"
        ]
    )
    asked = TurnRequest([prompt] * 3, [{"n": one} for one in range(3)], [0, 1, 2], [7] * 3, range(3))
    multi_turn = MultiTurn(
        world.environment,
        marks,
        marks.encoder.tokenizer,
        4,
        30.0,
        Recorded(tmp_path, 0, 0),
        bool,
        WaitReporter(print),
        print,
    )
    heard = multi_turn.converse(engine, asked, Decoding(LIMIT, frozenset({STOP}), 0, 1.0), 1, needed=True)
    check_ids(heard, engine)
    for number, one in enumerate(heard.answers):
        assert f"Go.\n\nnumber {number} of 7" in marks.encoder.tokenizer.decode(one.prompt)
        assert len(one.prompt) + len(one.response) <= len(prompt) + LIMIT


def test_a_call_that_fails_is_made_again_in_a_new_episode(marks, tmp_path):
    broken = set()

    class Fragile(Counting):
        def step(self, answer):
            said = super().step(answer)
            if self.count == 2 and answer not in broken:
                broken.add(answer)
                raise OSError("gone")
            return said

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    heard = World(marks, tmp_path / "a", Fragile).hold(Engine(stops=1.0), limit=400)
    wanted = World(marks, tmp_path / "b", Counting).hold(Engine(stops=1.0), limit=400)
    assert heard.answers == wanted.answers
    assert heard.scores == wanted.scores
    assert (heard.sums["environment_repeated"], Fragile.made) == (6, 12)
    assert World(marks, tmp_path / "a", Fragile).hold(Engine(stops=1.0), limit=400) == heard
    assert Fragile.made == 0


def test_one_that_fails_again_is_left_out_and_counted(marks, tmp_path):
    class Dies(Counting):
        def reset(self, record, seed):
            super().reset(record, seed)
            self.dies = record["n"] == 2

        def step(self, answer):
            if self.dies:
                raise RuntimeError("full")
            return super().step(answer)

    world = World(marks, tmp_path, Dies)
    heard = world.hold(Engine(stops=1.0), limit=400)
    assert [one.outcome for one in heard.scores] == ["scored", "scored", "raised", "scored", "scored", "scored"]
    assert math.isnan(heard.scores[2].value)
    assert (heard.sums["environment_raised"], heard.sums["environment_timed_out"]) == (1, 0)
    (line,) = world.told
    assert "RuntimeError: full" in line
    assert "record 2" in line


class Closing(Counting):
    """Remembers when one of a record is made and closed."""

    events: ClassVar[list[tuple[str, int]]] = []

    def reset(self, record, seed):
        super().reset(record, seed)
        self.number = record["n"]
        self.events.append(("made", self.number))

    def close(self):
        self.events.append(("closed", self.number))


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(Closing, "events", [])
    return Closing.events


def test_an_object_whose_call_failed_is_closed_before_another_is_made(marks, tmp_path, events):
    class Fails(Closing):
        def step(self, answer):
            if self.number == 1:
                raise OSError("gone")
            return super().step(answer)

    World(marks, tmp_path, Fails).hold(Engine(stops=1.0), 3, limit=400)
    assert [name for name, number in events if number == 1] == ["made", "closed"] * 2
    assert sorted(events) == sorted([("closed", n) for n in (0, 1, 1, 2)] + [("made", n) for n in (0, 1, 1, 2)])


@pytest.mark.parametrize("by", ["engine", "environment"])
def test_what_ends_the_run_leaves_no_object_open(marks, tmp_path, events, by):
    class Odd(Closing):
        def step(self, answer):
            return 7 if by == "environment" and self.number == 1 else super().step(answer)

    class Breaks(Engine):
        def answer(self, prompts, decoding, places=None, limits=None):
            if by == "engine" and 0 in self.seen:
                raise RuntimeError("no device")
            return super().answer(prompts, decoding, places, limits)

    with pytest.raises((RuntimeError, InputError)):
        World(marks, tmp_path, Odd).hold(Breaks(stops=1.0), 3, limit=400)
    assert sorted(events) == [("closed", n) for n in range(3)] + [("made", n) for n in range(3)]


def test_one_that_is_late_is_closed_by_its_own_thread(marks, tmp_path, events):
    on, closed = threading.Event(), threading.Event()
    threads = {}

    class Hangs(Closing):
        def step(self, answer):
            if self.number == 1:
                threads.setdefault(threading.get_ident(), self)
                on.wait(60)
            return super().step(answer)

        def close(self):
            super().close()
            if self.number == 1:
                assert threads[threading.get_ident()] is self
                closed.set()

    World(marks, tmp_path, Hangs, seconds=SECONDS).hold(Engine(stops=1.0), 3, limit=400)
    assert ("closed", 1) not in events
    on.set()
    assert closed.wait(60)


def test_objects_are_closed_at_once_and_failures_told_in_one_line(marks, tmp_path, events):
    together = threading.Barrier(6)

    class Meets(Closing):
        def close(self):
            together.wait(20)
            if self.number in (2, 3):
                raise OSError("locked")

    world = World(marks, tmp_path, Meets)
    heard = world.hold(Engine(stops=1.0), limit=400)
    assert [one.outcome for one in heard.scores] == ["scored"] * 6
    (line,) = world.told
    assert "2 of 6" in line
    assert "locked" in line


class Moody(Counting):
    fails = ()

    def reset(self, record, seed):
        super().reset(record, seed)
        self.number = record["n"]

    def step(self, answer):
        if self.number in self.fails:
            raise RuntimeError("not today: \udcff")
        return super().step(answer)


def test_what_failed_fails_again_when_a_step_is_repeated(marks, tmp_path, monkeypatch):
    monkeypatch.setattr(Moody, "fails", {1, 4})
    first = World(marks, tmp_path, Moody)
    heard = first.hold(Engine(stops=1.0), limit=400)
    assert heard.sums["environment_raised"] == 2
    monkeypatch.setattr(Moody, "fails", ())
    again = World(marks, tmp_path, Moody)
    assert str(again.hold(Engine(stops=1.0), limit=400)) == str(heard)  # NaN is not equal to itself
    assert Moody.made == 0
    assert again.told == first.told
    path = tmp_path / "turns-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(one for one in lines if '"lost"' not in one))  # twin: without the record
    other = World(marks, tmp_path, Moody).hold(Engine(stops=1.0), limit=400)
    assert other.sums["environment_raised"] == 0


def test_what_ended_the_run_is_asked_again(marks, tmp_path, monkeypatch):
    monkeypatch.setattr(Moody, "fails", range(6))
    with raises_fault("SF-ENVIRONMENT", "own.py:Own"):
        World(marks, tmp_path, Moody).hold(Engine(stops=1.0), limit=400)
    monkeypatch.setattr(Moody, "fails", ())
    heard = World(marks, tmp_path, Moody).hold(Engine(stops=1.0), limit=400)
    assert [one.value for one in heard.scores] == [2.0] * 6


def test_one_that_is_late_is_left_behind(marks, tmp_path):
    never = threading.Event()

    class Hangs(Counting):
        def reset(self, record, seed):
            super().reset(record, seed)
            self.hangs = record["n"] == 1

        def step(self, answer):
            if self.hangs:
                never.wait(60)
            return super().step(answer)

    heard = World(marks, tmp_path, Hangs, seconds=SECONDS).hold(Engine(stops=1.0), 3, limit=400)
    never.set()
    assert [one.outcome for one in heard.scores] == ["scored", "timed_out", "scored"]
    assert heard.sums["environment_timed_out"] == 1
    time.sleep(0.05)  # what it says now is not heard
    kept = [json.loads(one) for one in (tmp_path / "turns-0.jsonl").read_text().splitlines()]
    assert [sum(name in one for one in kept) for name in ("reply", "lost")] == [3 + 2 * 3, 1]


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ({"reward": math.nan, "done": True}, "not_finite"),
        ({"observation": "on", "reward": -math.inf}, "not_finite"),
        ({"observation": "half a pair: \ud83d"}, "raised"),
        ({"done": True, "reason": "\udcff"}, "raised"),
    ],
)
def test_a_reply_that_cannot_be_kept_is_an_outcome_of_its_own(marks, tmp_path, reply, outcome):
    class Odd(Counting):
        def reset(self, record, seed):
            super().reset(record, seed)
            self.odd = record["n"] == 2

        def step(self, answer):
            said = super().step(answer)
            return reply if self.odd else said

    world = World(marks, tmp_path, Odd, seconds=5.0)
    heard = world.hold(Engine(stops=1.0), 3, limit=400)
    assert [one.outcome for one in heard.scores] == ["scored", "scored", outcome]
    assert {name: count for name, count in heard.sums.items() if name.startswith("environment_") and count} == {
        "environment_repeated": 1,
        f"environment_{outcome}": 1,
    }
    (line,) = world.told
    assert "record 2" in line
    assert "\n" not in line


def test_a_sum_of_rewards_without_end_is_counted(marks, tmp_path):
    class Vast(Counting):
        def step(self, answer):
            return {**super().step(answer), "reward": 1e308}

    heard = World(marks, tmp_path, Vast).hold(Engine(stops=1.0), 2, limit=400)
    assert [one.outcome for one in heard.scores] == ["not_finite"] * 2
    assert heard.sums["environment_not_finite"] == 2


def test_a_full_disk_is_the_runs_fault_and_no_answers(marks, tmp_path, monkeypatch):
    def full(path, record):
        raise EnvironmentFault(Fault(str(path), "cannot be written: no space left", code="SF-DISK-FULL"))

    monkeypatch.setattr(journal, "append", full)
    with raises_fault("SF-DISK-FULL", str(tmp_path / "turns-0.jsonl")) as caught:
        World(marks, tmp_path, Counting, seconds=5.0).hold(Engine(stops=1.0), 2)
    assert caught.value.exit_code == 3


def test_one_that_answers_nothing_ends_the_run(marks, tmp_path):
    class Broken(Counting):
        def step(self, answer):
            raise ZeroDivisionError("by zero")

    with raises_fault("SF-ENVIRONMENT", "own.py:Own") as caught:
        World(marks, tmp_path, Broken).hold(Engine(stops=1.0))
    assert "ZeroDivisionError" in caught.value.faults[0].what
    assert caught.value.exit_code == 2


class Dead(Counting):
    def step(self, answer):
        raise ZeroDivisionError("by zero")


def test_a_redraw_or_an_evaluation_that_is_lost_is_counted_alone(marks, tmp_path):
    world = World(marks, tmp_path, Dead)
    heard = world.hold(Engine(stops=1.0), 2, needed=False)
    assert [one.outcome for one in heard.scores] == ["raised"] * 2
    assert len(world.told) == 1


def test_all_ranks_decide_together_whether_nothing_is_left(marks, tmp_path):
    """A rank whose own answers are all lost goes on if another's are not; one without answers ends with the others."""
    world = World(marks, tmp_path, Dead)
    theirs = iter([True, False, True])  # the other rank has a turn to draw, has none, has a score
    world.anywhere = lambda own: next(theirs) or own
    heard = world.hold(Engine(stops=1.0), 2)
    assert [one.outcome for one in heard.scores] == ["raised"] * 2
    theirs = iter([True, False, False])
    with raises_fault("SF-ENVIRONMENT", "own.py:Own"):
        world.hold(Engine(stops=1.0), 0)


@pytest.mark.parametrize(
    "value",
    [
        {"observation": 3},
        {"reward": "much", "done": True},
        {"done": False},
        {"said": "x"},
        {"done": 1},
        [{"role": "system", "content": "x"}],
        7,
    ],
)
def test_a_reply_of_another_form_is_refused_at_once(marks, tmp_path, value):
    class Odd(Counting):
        def step(self, answer):
            return value

    with raises_fault("SF-ENVIRONMENT", "own.py:Own"):
        World(marks, tmp_path, Odd).hold(Engine(stops=1.0))
    assert Odd.made == 6


def test_forms_of_a_reply():
    assert reply_of("go on", "tool", "own") == Reply((("tool", "go on", ""),))
    assert reply_of(None, "tool", "own") == Reply((), done=True)
    assert reply_of(None, "tool", "own", opening=True) == Reply(())
    messages = [{"role": "tool", "name": "add", "content": "3"}, {"role": "user", "content": "so?"}]
    found = reply_of({"observation": messages, "reward": 0.5, "reason": "near"}, "user", "own")
    assert found == Reply((("tool", "3", "add"), ("user", "so?", "")), 0.5, False, "near")
    assert [(one.role, one.tool) for one in found.turns] == [("tool", "add"), ("user", "")]


def test_what_was_heard_is_not_asked_again(marks, tmp_path):
    first = World(marks, tmp_path, Counting).hold(Engine(), limit=400)
    assert Counting.made == 6
    again = World(marks, tmp_path, Counting)
    assert again.hold(Engine(), limit=400) == first
    assert Counting.made == 0
    again.hold(Engine(), limit=400, step=2)  # twin: another step is not this one
    assert Counting.made == 6


def test_an_episode_that_was_cut_goes_on_where_it_was(marks, tmp_path):
    whole = World(marks, tmp_path, Counting).hold(Engine(stops=1.0), limit=400)
    path = tmp_path / "turns-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(lines[:14]) + lines[14][:20]
    )  # six resets, six first turns, two second ones and half a line
    assert World(marks, tmp_path, Counting).hold(Engine(stops=1.0), limit=400) == whole
    assert Counting.made == 6


def test_an_episode_that_cannot_be_brought_back_is_left_out(marks, tmp_path):
    class Changing(Counting):
        mood = "glad"

        def step(self, answer):
            said = super().step(answer)
            return {**said, "observation": self.mood} if "observation" in said else said

    World(marks, tmp_path, Changing).hold(Engine(stops=1.0), limit=400)
    path = tmp_path / "turns-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:13]))  # one alone has its second turn
    Changing.mood = "sad"
    with raises_fault("SF-ENVIRONMENT", "own.py:Own"):
        World(marks, tmp_path, Changing).hold(Engine(stops=1.0), limit=400)


def named(world):
    return any("(records 3) since" in one for one in world.told)


def until(seen, seconds=30.0):
    ends = time.monotonic() + seconds
    while not seen() and time.monotonic() < ends:
        time.sleep(0.01)


def test_a_wait_names_the_records_that_are_waited_for(marks, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "LEAST", 0.02)

    class Slow(Counting):
        def step(self, answer):
            if self.count == 0 and self.slow:
                until(lambda: named(world))
            return super().step(answer)

        def reset(self, record, seed):
            super().reset(record, seed)
            self.slow = record["n"] == 3

    world = World(marks, tmp_path, Slow)
    world.hold(Engine(stops=1.0), limit=400)
    assert named(world)


def test_a_call_that_is_over_is_no_longer_waited_for_while_an_earlier_one_is():
    told, on = [], threading.Event()

    def waiting(numbers):
        told.append(list(numbers))
        if told[-1] == [0]:
            on.set()

    made = [calls.Call(lambda: on.wait(20), 30.0, lambda said: None), calls.Call(lambda: True, 30.0, lambda said: None)]
    assert calls.in_time(made, waiting) == [True, True]
    assert told == [[0, 1], [0], []]


def test_many_calls_go_in_parts(monkeypatch):
    monkeypatch.setattr(calls, "AT_ONCE", 2)
    found: list[int] = []
    made = [calls.Call(lambda number=number: number, 5.0, found.append) for number in range(5)]
    assert calls.in_time(made, lambda numbers: None) == list(range(5))
    assert sorted(found) == list(range(5))


@pytest.mark.parametrize(
    ("text", "name", "code"),
    [
        ("class Own:\n    def reset(self, record): ...\n", "Own", "SF-OWN-FUNCTION"),
        (
            "class Own:\n    role = 'system'\n    def reset(self, record): ...\n    def step(self, answer): ...\n",
            "Own",
            "SF-OWN-FUNCTION",
        ),
        ("class Own: ...\n", "Onw", "SF-OWN-FUNCTION"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(tmp_path, text, name, code):
    (tmp_path / "own.py").write_text(text)
    with raises_fault(code, "grpo.environment.name"):
        open_environment(EnvironmentTerm(name=f"{tmp_path / 'own.py'}:{name}"))
