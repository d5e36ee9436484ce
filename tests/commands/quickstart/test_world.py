"""The world holds together: the base can know what it is asked, cannot know the answers, and nothing tells them. The
shipped base: made by the script in the repository, what its card says, at chance before fine-tuning."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

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


SCRIPT = REPOSITORY / "tools" / "build_quickstart_base.py"
LARGEST_BASE = 10_000_000  # bytes; promised by the documentation


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(world.base_folder())


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(world.base_folder(), dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


def test_the_files_are_those_of_the_manifest():
    manifest = (REPOSITORY / "docs" / "quickstart-base.md").read_text(encoding="utf-8")
    shipped = digests(world.base_folder())
    assert set(shipped) >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}
    for name, digest in shipped.items():
        assert name == "README.md" or f"`{digest}` | `{name}`" in manifest, name


def test_the_base_is_small():
    assert sum(path.stat().st_size for path in world.base_folder().iterdir()) <= LARGEST_BASE


def test_every_weight_is_finite():
    weights = load_file(world.base_folder() / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in weights.values())


def test_the_tokenizer_is_the_one_that_the_text_gives(tmp_path: Path):
    script.build_tokenizer(list(script.pretraining_text())).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path, world.base_folder()))
        assert made == shipped, name
    template = "chat_template.jinja"
    assert (tmp_path / template).read_text() == (world.base_folder() / template).read_text()


def test_twin_another_text_gives_another_tokenizer():
    made = script.build_tokenizer(list(script.pretraining_text(seed=2))[:500])
    shipped = json.loads((world.base_folder() / "tokenizer.json").read_text())
    assert json.loads(made.backend_tokenizer.to_str())["model"]["merges"] != shipped["model"]["merges"]


def test_conversations_start_with_one_bos_and_every_turn_ends_with_the_stop_token(tokenizer):
    turns = [
        {"role": "user", "content": "Where is the heron?"},
        {"role": "assistant", "content": "In the red room."},
        {"role": "user", "content": "Where is the oak?"},
    ]
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == len(turns)
    assert tokenizer("A heron").input_ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_is_the_beginning_of_its_conversation(tokenizer):
    question = [{"role": "user", "content": "Where is the heron?"}]
    answer = [{"role": "assistant", "content": "In the red room."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False)
    whole = tokenizer.apply_chat_template(question + answer, tokenize=True, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "In the red room.<|end|>"


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template([{"role": "tool", "content": "1"}], tokenize=False)


def test_text_cannot_contain_the_padding_token_by_accident(tokenizer):
    assert tokenizer.pad_token_id not in {tokenizer.eos_token_id, tokenizer.bos_token_id, 0}


def test_the_base_knows_its_facts(base: LlamaForCausalLM, tokenizer):
    assert script.knowledge(base, tokenizer) == 1.0


def test_twin_an_untrained_model_knows_nothing(tokenizer):
    assert script.knowledge(script.build_model(tokenizer), tokenizer) < 0.3


@pytest.mark.slow
def test_building_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "THREADS", torch.get_num_threads())  # those of this test process, which others share
    documents = list(script.pretraining_text())[: 3 * script.BATCH]
    for folder in ("first", "second"):
        script.build(tmp_path / folder, documents)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


@pytest.mark.slow
def test_the_whole_base_can_be_rebuilt(tmp_path: Path):
    """Two fresh processes, the same bytes; on another machine than the shipped base's, as good, perhaps not equal."""
    free = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    for folder in ("first", "second"):
        subprocess.run([sys.executable, SCRIPT, "--output", tmp_path / folder], check=True, env=free)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    assert script.knowledge(model, AutoTokenizer.from_pretrained(tmp_path / "first")) >= 0.99
