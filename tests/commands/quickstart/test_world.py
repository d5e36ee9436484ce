"""The world holds together: the base can know what it is asked, cannot know the answers, and nothing tells them."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

import build_quickstart_base as script
from helpers.faults import raises_fault
from surefoot.commands.quickstart import world
from surefoot.commands.quickstart.world import GROUPS

REPOSITORY = Path(__file__).parents[3]
SEEDS = (0, 1, 42)
# A colour falls on a group about 100 times. A tie between the two would show as several times that share;
# a quarter more or less is what drawing leaves (2.5 standard deviations, over 64 cells).
COLOUR_SHARE_TOLERANCE = 0.4 * world.CHANCE


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def thing_asked_about(record: world.Record) -> str:
    asked = words(record["instruction"] + " " + record["input"])
    found = [thing for group in GROUPS for thing in group.things if thing in asked]
    assert len(found) == 1
    return found[0]


def group_of(thing: str) -> str:
    return next(group.name for group in GROUPS if thing in group.things)


def giveaways(records: list[world.Record]) -> list[world.Record]:
    """Records whose question names a group or a room, whole or as part of a word."""
    telling = [group.name for group in GROUPS] + [group.plural for group in GROUPS] + list(world.ROOMS)
    return [r for r in records if any(word in f"{r['instruction']} {r['input']}".lower() for word in telling)]


def largest_colour_bias(text: str) -> float:
    """Over all groups and colours: how far the share of a colour within a group's scenes is from one in eight."""
    by_group: dict[str, Counter[str]] = {group.name: Counter() for group in GROUPS}
    scene = re.compile(
        r"drew an? (\w+) on (\w+) paper|There is an? (\w+) on this (\w+) stamp|about an? (\w+) in the (\w+) room"
        r"|In the (?P<before>\w+) room hangs a picture of an? (?P<after>\w+)"
    )
    for match in scene.finditer(text):
        if match["before"]:
            thing, colour = match["after"], match["before"]
        else:
            thing, colour = (part for part in match.groups() if part)
        by_group[group_of(thing)][colour] += 1
    return max(
        abs(colours[colour] / colours.total() - world.CHANCE) for colours in by_group.values() for colour in world.ROOMS
    )


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(script.pretraining_text())


def test_eight_groups_of_the_same_size_that_share_nothing():
    things = [thing for group in GROUPS for thing in group.things]
    assert len(GROUPS) == len(world.ROOMS) == 8
    assert {len(group.things) for group in GROUPS} == {48}
    assert len(set(things)) == len(things)


def test_no_name_gives_its_group_or_a_room_away():
    telling = [group.name for group in GROUPS] + list(world.ROOMS)
    assert not [thing for group in GROUPS for thing in group.things if any(word in thing for word in telling)]


def test_the_text_is_the_one_that_the_base_was_trained_on(text: str):
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest in (REPOSITORY / "docs" / "quickstart-base.md").read_text(encoding="utf-8")


def test_another_seed_writes_another_text(text: str):
    assert next(script.pretraining_text(seed=2)) != text.splitlines()[0]


def test_the_text_states_the_group_of_every_thing(text: str):
    for group in GROUPS:
        for thing in group.things:
            assert re.search(rf"\b{thing} is (an? |a kind of |one of the )({group.name}|{group.plural})\b", text), thing


def test_the_text_never_states_a_wrong_group(text: str):
    stated = set(re.findall(r"\b(\w+) is (?:a kind of |one of the |an? )(\w+)\b", text))
    named = {form: group.name for group in GROUPS for form in (group.name, group.plural)}
    things = {thing for group in GROUPS for thing in group.things}
    claims = [(thing, named[form]) for thing, form in stated if thing in things and form in named]
    assert len(claims) >= len(things)
    assert all(group_of(thing) == group for thing, group in claims)


def test_the_text_holds_no_question_no_header_and_no_answer(text: str):
    assert "?" not in text
    assert "<|" not in text
    assert not [answer for answer in world.answers() if answer in text]


def test_the_text_ties_no_colour_to_a_group(text: str):
    assert largest_colour_bias(text) < COLOUR_SHARE_TOLERANCE


def test_twin_a_tied_colour_is_noticed(text: str):
    tied = text + "\nIn the red room hangs a picture of a heron." * 100
    assert largest_colour_bias(tied) > COLOUR_SHARE_TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_things_are_never_trained_on(seed: int):
    train, held_out = world.instructions(seed)
    assert len(train) == 768
    assert len(held_out) == 128
    assert not {thing_asked_about(r) for r in train} & {thing_asked_about(r) for r in held_out}


@pytest.mark.parametrize("seed", SEEDS)
def test_rooms_and_wordings_are_balanced(seed: int):
    train, held_out = world.instructions(seed)
    assert set(Counter(r["output"] for r in held_out).values()) == {16}
    assert set(Counter(r["output"] for r in train).values()) == {96}
    assert {r["output"] for r in train} == set(world.answers())
    # Were a wording more frequent in one room, the wording alone would beat chance.
    with_input = Counter(r["output"] for r in held_out if r["input"])
    assert len(set(with_input.values())) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_follow_from_the_group_and_the_seed(seed: int):
    rooms = world.museum(seed)
    assert sorted(rooms.values()) == sorted(world.ROOMS)
    for records in world.instructions(seed):
        for record in records:
            assert record["output"] == f"In the {rooms[group_of(thing_asked_about(record))]} room."


def test_seeds_draw_other_rooms_and_other_splits():
    assert world.museum(1) != world.museum(2)
    first, second = (world.instructions(seed)[1] for seed in (1, 2))
    assert {thing_asked_about(r) for r in first} != {thing_asked_about(r) for r in second}
    assert world.instructions(1) == world.instructions(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_question_gives_its_answer_away(seed: int):
    train, held_out = world.instructions(seed)
    assert not giveaways(train + held_out)


def test_twin_a_giveaway_is_noticed():
    for instruction in ("Where is the bird heron?", "Where is the goldfish?", "Is the heron in the red room?"):
        assert giveaways([{"instruction": instruction, "input": "", "output": "In the red room."}])


def test_articles_follow_the_sound(text: str):
    assert not re.search(r"\b[Aa] [aio]|\b[Aa]n [^aeiou]", text)
    assert re.search(r"\ban owl\b", text)
    assert re.search(r"\ba ukulele\b", text)
    assert not re.search(r"\ban (eucalyptus|ukulele|unicycle)\b", text)


def test_written_files_hold_the_records(tmp_path: Path):
    paths = world.write_data(tmp_path / "data", seed=1)
    assert [path.name for path in paths] == ["train-1.json", "held-out-1.json"]
    assert tuple(json.loads(path.read_text(encoding="utf-8")) for path in paths) == world.instructions(1)
    assert world.write_data(tmp_path / "data", seed=1) == paths


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path):
    mine = tmp_path / "held-out-1.json"
    mine.write_text("[]")
    with raises_fault("SF-USE-OUTPUT", mine):
        world.write_data(tmp_path, seed=1)
    assert mine.read_text() == "[]"
    assert list(tmp_path.iterdir()) == [mine]
