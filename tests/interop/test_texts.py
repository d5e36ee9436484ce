"""Code that shapes a script's data is told as changed, with both texts of the first record; so is how texts are cut."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import transformers

from equality import models
from equality.ours import run_until_step_1
from surefoot.commands.translate import reading_options
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.interop.script.data import first_text
from surefoot.interop.script.literals import Script

SCRIPT = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("m"{tokenizer})
model = AutoModelForCausalLM.from_pretrained("m")
data = load_dataset("json", data_files="d.json", split="train")
{code}
trainer = Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data)
trainer.train()
"""
RECORD = {"instruction": "Add 2 and 3.", "input": "", "output": "5"}
THEIRS = "Q: Add 2 and 3. A: 5"
FORMAT = "def fmt(x):\n    return {'text': f\"Q: {x['instruction']} A: {x['output']}\"}\n"
KNOWN = {
    FORMAT: "fmt",
    "def fmt(x):\n    x['text'] = 'Q: ' + x['instruction'] + ' A: ' + x.get('output', '')\n    return x\n": "fmt",
    "def fmt(row):\n    whole = f\"Q: {row['instruction']} A: {row['output']}\"\n    return whole\n": "fmt",
    "def fmt(row):\n    '''Words.'''\n    return [f\"Q: {row['instruction']} A: {row['output']}\"]\n": "fmt",
    "": "lambda x: tokenizer(f\"Q: {x['instruction']} A: {x['output']}\", truncation=True)",
}
UNKNOWN = {
    "def fmt(x):\n    return {'text': build(x)}\n": "fmt",
    "def fmt(x):\n    if x['input']:\n        return {'text': 'a'}\n    return {'text': 'b'}\n": "fmt",
    "def fmt(x, y):\n    return {'text': 'a'}\n": "fmt",
    "": "imported",
}


def options(trained="OURS"):
    return Options(first=lambda path: RECORD if path == "d.json" else None, example=lambda config: trained)


def translated(code="", tokenizer="", given=None):
    return translate_file("train.py", SCRIPT.format(code=code, tokenizer=tokenizer), [], given or options())


def changed(found):
    return [note for note in found.notes if note.outcome == "changed"]


@pytest.mark.parametrize("code", KNOWN)
def test_a_text_that_a_function_spells_out_is_known(code):
    script = Script.parse(f"{code}it = {KNOWN[code]}\n", "s.py")
    assert first_text(script, script.names["it"][0][1], RECORD) == THEIRS
    assert first_text(script, script.names["it"][0][1], {**RECORD, "output": "6"}) != THEIRS


@pytest.mark.parametrize("code", UNKNOWN)
def test_another_text_is_not(code):
    script = Script.parse(f"{code}it = {UNKNOWN[code]}\n", "s.py")
    assert first_text(script, script.names["it"][0][1], RECORD) is None


def test_functions_on_the_data_are_changed_with_both_texts():
    found = translated(f"{FORMAT}data = data.map(fmt).map(lambda x: tokenizer(x['text']), remove_columns=['text'])")
    first, second = changed(found)
    assert (first.where, second.where) == ("train.py:8:8", "train.py:8:8")
    for note in (first, second):  # the second sees what the first made
        assert repr(THEIRS) in note.why
        assert repr("OURS") in note.why
    assert changed(translated()) == []  # twin: without functions
    unseen = changed(translated(f"{FORMAT}data = data.map(fmt)", given=Options()))
    assert [(note.word, THEIRS in note.why) for note in unseen] == [(".map(fmt)", False)]


def test_what_only_takes_columns_away_is_not():
    found = translated("data = data.remove_columns(['input'])")
    assert [note.outcome for note in found.notes if "remove_columns" in note.word] == ["listed"]
    assert changed(found) == []


def test_what_surefoot_trains_is_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models.build("llama2", tmp_path)
    (tmp_path / "llama2").rename(tmp_path / "m")
    (tmp_path / "d.json").write_text(json.dumps([RECORD, {**RECORD, "output": "6"}]))
    found = translated(f"{FORMAT}data = data.map(fmt)", given=reading_options())
    ids = run_until_step_1(json.loads(json.dumps(found.config)), step=False).examples[0]["ids"]
    trained = transformers.AutoTokenizer.from_pretrained("m").decode(ids)
    (note,) = changed(found)
    assert THEIRS in note.why
    assert repr(trained) in note.why
    away = replace(reading_options(), example=lambda config: None)
    assert repr(trained) not in changed(translated(f"{FORMAT}data = data.map(fmt)", given=away))[0].why  # twin


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        ("truncation=True", "listed"),
        ("truncation=False", "changed"),
        ("truncation=pick()", "listed"),
        ("padding='max_length'", "listed"),
        ("padding=False", "listed"),
        ("truncation_side='left'", "changed"),
        ("truncation_side='right'", "listed"),
        ("padding_side='left'", "listed"),
        ("add_special_tokens=False", "changed"),
        ("add_eos_token=True", "changed"),
    ],
)
def test_how_texts_are_cut_and_padded_stands_in_the_account(word, outcome):
    loaded, called = translated(tokenizer=f", {word}"), translated(f"data = data.map(lambda x: tokenizer(x, {word}))")
    for found in (loaded, called):
        assert [note.outcome for note in found.notes if note.word == word] == [outcome]


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_attribute_says_it_too(side):
    found = translated(f"tokenizer.truncation_side = '{side}'")
    (note,) = [note for note in found.notes if "truncation_side" in note.word]
    assert note.outcome == ("changed" if side == "left" else "listed")


def test_the_longest_text_is_read_where_it_stands():
    assert translated(tokenizer=", model_max_length=99").config["data"]["max_length"] == 99
    assert translated("t = tokenizer('a', max_length=98)").config["data"]["max_length"] == 98
    assert "max_length" not in translated().config["data"]
