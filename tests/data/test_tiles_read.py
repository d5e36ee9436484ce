"""Llama 3.2 Vision: which tiles each token reads, beside transformers' processor; rows with equally many pictures."""

import pytest
import torch
from PIL import Image

from data.test_picture_families import RECORD, SIZES, TURNS, prepared
from helpers.faults import raises_fault
from helpers.seeing import picture
from helpers.seeing_families import reference, seeing_family
from surefoot.data.batching.loader import Layout, all_example_batches, example_batches
from surefoot.models.facts import facts_of
from surefoot.models.forward import picture_inputs
from surefoot.models.load import load_model, load_tokenizer
from surefoot.runs.api import plan

_TEXT = {"role": "assistant", "content": [{"type": "text", "text": "yes, the longest of these answers"}]}
# Names of pictures as the parts of one turn of a user, with texts between them; by how many pictures there are.
ROWS = {
    "one": [["red"], ["what?", "blue"]],
    "two": [["red", "blue"], ["red", "or", "green", "?"], ["a", "blue", "red"]],
    "three": [["red", "blue", "and", "green"], ["red", "and", "blue", "green"], ["red", "blue", "green"]],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mllama")
    for colour, size in SIZES.items():
        picture(folder / f"{colour}.png", colour, size)
    return seeing_family("mllama", folder / "base")


def turns_of(row):
    parts = [{"type": "image", "path": f"{one}.png"} if one in SIZES else {"type": "text", "text": one} for one in row]
    return [{"role": "user", "content": parts}, _TEXT]


def inputs_of(base, batch):
    """The arguments of the model's forward."""
    return picture_inputs(_model(base), batch.pixels, batch.seen)


def _model(base):
    return load_model(base, dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu"))


def processed(base, rows):
    """transformers' own inputs for conversations."""
    processor = reference("mllama", base)
    texts = [processor.tokenizer.apply_chat_template(turns, tokenize=False) for turns in rows]
    names = [[part["path"] for turn in turns for part in turn["content"] if part["type"] == "image"] for turns in rows]
    images = [[Image.open(base.parent / name) for name in own] for own in names]
    how = {"add_special_tokens": False, "padding": True, "padding_side": "right", "return_tensors": "pt"}
    return processor(text=texts, images=images, **how)


@pytest.mark.parametrize("count", ROWS)
def test_tokens_read_the_tiles_that_transformers_processor_says(base, tmp_path, count):
    conversations = [turns_of(row) for row in ROWS[count]]
    rows = [{"messages": turns} for turns in conversations]
    data = prepared(base, base.parent, rows).train
    (batch,) = example_batches(data, range(len(rows)), Layout(0))
    expected = processed(base, [conversations[number - 1] for number in batch.examples])
    found = inputs_of(base, batch)
    assert batch.input_ids.shape == expected["input_ids"].shape  # padded
    assert found.keys() == expected.keys() - {"input_ids", "attention_mask"}
    assert all(torch.equal(found[key], expected[key]) for key in found)
    batch.seen[:, -1] = 1 - batch.seen[:, -1]  # twin: a place more
    assert not torch.equal(inputs_of(base, batch)["cross_attention_mask"], expected["cross_attention_mask"])


def test_turns_read_the_pictures_before_them(base):
    data = prepared(base, base.parent, [RECORD]).train
    (batch,) = example_batches(data, [0], Layout(0))
    assert torch.equal(inputs_of(base, batch)["cross_attention_mask"], processed(base, [TURNS])["cross_attention_mask"])


def test_rows_of_a_micro_batch_have_equally_many_pictures(base):
    """Padded by a blank picture, the tokens before the first one would read that as well, in transformers' forward."""
    text = {"messages": [{"role": "user", "content": "hello"}, _TEXT]}
    rows = [text, *({"messages": turns_of(row)} for own in ROWS.values() for row in own)]
    data = prepared(base, base.parent, rows).train
    counts = [0, 1, 1, 2, 2, 2, 3, 3, 3]
    for batches in (example_batches(data, range(9), Layout(0)), list(all_example_batches(data, Layout(0)))):
        held = [{counts[int(number) - 1] for number in batch.examples} for batch in batches]
        assert sorted(map(len, held)) == [1, 1, 1, 1]
        assert sorted(number for batch in batches for number in batch.examples) == list(range(1, 10))
    small = example_batches(data, range(9), Layout(0, most=2))
    assert max(len(batch.examples) for batch in small) == 2
    assert not next(batch for batch in small if 1 in batch.examples).pixels


def test_no_token_is_added_where_the_head_lacks_rows_of_the_embedding(base, tmp_path):
    """<|image|> is the first of these rows: it is read, and never predicted."""
    facts = facts_of(base)
    assert facts.spare_rows == 8
    assert load_tokenizer(base).get_vocab()["<|image|>"] == facts.vocab
    raw = {"stage": "sft", "model": str(base), "data": {"train": str(base.parent / "d.jsonl")}, "output": str(tmp_path)}
    prepared(base, base.parent, [RECORD])
    assert not any("<|image|>" in text for text in plan(raw).cautions)
    for key in ("add", "add_special"):
        with raises_fault("SF-CONFIG-CONFLICT", f"tokenizer.{key}"):
            plan(raw | {"tokenizer": {key: ["<new>"]}})
