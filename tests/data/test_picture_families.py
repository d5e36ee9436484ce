"""Pictures of each family: ids and pixels beside transformers' own processor, labels, limits, templates' forms."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from helpers.faults import raises_fault
from helpers.prepared import prepared as prepare
from helpers.seeing import picture
from helpers.seeing_families import FAMILIES, reference, seeing_family
from surefoot.data.batching.loader import Layout, example_batches
from surefoot.data.formats.conversation import RowFault
from surefoot.data.tokenize import picture_processor
from surefoot.data.tokenize.picture_processor import check_max_pixels, read_processor
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.models.forward import _joined
from surefoot.models.load import load_tokenizer
from surefoot.system.errors import EnvironmentFault

SIZES = {"red": (56, 56), "blue": (90, 40), "green": (30, 64)}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    for colour, size in SIZES.items():
        picture(folder / f"{colour}.png", colour, size)
    return request.param, seeing_family(request.param, folder / "base"), folder


def parts(*given):
    return [{"type": "image", "path": f"{one}.png"} if one in SIZES else {"type": "text", "text": one} for one in given]


TURNS = [
    {"role": "user", "content": parts("Which of", "red", "and, behind it or to the right of it,", "blue", "is red?")},
    {"role": "assistant", "content": parts("the first")},
    {"role": "user", "content": parts("green", "and this?")},
    {"role": "assistant", "content": parts("the last")},
]
RECORD = {
    "messages": [
        turn | ({"content": turn["content"][0]["text"]} if number % 2 else {}) for number, turn in enumerate(TURNS)
    ]
}


def prepared(base, folder, rows, **asked):
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(base)
    asked = {"max_length": 4096, "pad_id": 0, **asked}
    return prepare(folder / "d.jsonl", tokenizer, folder / "cache", **asked)


def test_ids_and_pixels_are_those_of_transformers_processor(family):
    name, base, folder = family
    (batch,) = example_batches(prepared(base, folder, [RECORD]).train, [0], Layout(0))
    processor = reference(name, base)
    text = processor.tokenizer.apply_chat_template(TURNS, tokenize=False)
    images = [Image.open(folder / f"{colour}.png") for colour in SIZES]
    expected = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert batch.input_ids.tolist() == expected["input_ids"].tolist()
    token = AutoTokenizer.from_pretrained(base).get_vocab()[FAMILIES[name].image]
    assert torch.equal(batch.seen, (expected["input_ids"] == token).int())
    found = dict(batch.pixels[0])
    named = {"pixel_values", "pixel_attention_mask", "image_sizes", "image_position_ids"} & set(expected)
    named |= {"image_grid_thw", "aspect_ratio_ids", "aspect_ratio_mask", "spatial_shapes"} & set(expected)
    assert set(found) == named
    assert all(torch.equal(found[key], expected[key].to(found[key].dtype)) for key in found)
    twin = processor(text=[text], images=[images[::-1]], return_tensors="pt", add_special_tokens=False)
    assert not all(torch.equal(found[key], twin[key]) for key in found if twin[key].shape == found[key].shape) or (
        twin["input_ids"].tolist() != batch.input_ids.tolist()
    )


def test_rows_pad_their_pixels_as_transformers_processor_does(family):
    """One row has two pictures, the other one of another size."""
    name, base, folder = family
    if name == "mllama":
        pytest.skip("whose rows have equally many pictures, see tests/data/test_tiles_read.py")
    rows = [{"messages": [TURNS[0], RECORD["messages"][1]]}, {"messages": [TURNS[2], RECORD["messages"][3]]}]
    (batch,) = example_batches(prepared(base, folder, rows).train, [0, 1], Layout(0))
    processor = reference(name, base)
    texts = [processor.tokenizer.apply_chat_template(TURNS[at : at + 2], tokenize=False) for at in (0, 2)]
    images = [[Image.open(folder / f"{colour}.png") for colour in own] for own in (("red", "blue"), ("green",))]
    expected = processor(text=texts, images=images, return_tensors="pt", padding=True, add_special_tokens=False)
    order = [0, 1] if [int(one) for one in batch.examples] == [1, 2] else [1, 0]
    for key in dict(batch.pixels[0]):
        own = [dict(batch.pixels[place])[key] for place in order]
        assert torch.equal(_joined(own), expected[key].to(own[0].dtype)), key


def test_nothing_of_a_picture_is_learned_whatever_else_is(family, monkeypatch):
    """From the first control token of each picture to the last: breaks between tiles are the processor's, too."""
    name, base, folder = family
    data = prepared(base, folder, [RECORD], train_on="everything").train
    tokenizer, found = load_tokenizer(base), data[0]
    own = set(tokenizer.convert_tokens_to_ids([one for one in FAMILIES[name].tokens if one in _written(name)]))
    where = np.isin(found.ids, list(own))
    assert not found.supervised[where].any()
    inside = np.zeros(len(found.ids), dtype=bool)
    for run in _runs(where, gap=_widest_gap(name)):
        inside[run] = True
    assert not found.supervised[inside].any()
    assert found.supervised[~inside].sum() == (~inside).sum() - 1
    assert tokenizer.get_vocab()[FAMILIES[name].stop] in found.ids[found.supervised]
    monkeypatch.setattr(
        picture_processor.PictureProcessor, "within", lambda self, ids, pictures: np.isin(ids, [])
    )  # twin
    monkeypatch.setattr("surefoot.data.audit._sample", lambda *given: None)
    twin = prepared(
        base,
        folder,
        [{"messages": [*RECORD["messages"][:3], {"role": "assistant", "content": "no"}]}],
        train_on="everything",
    ).train[0]
    assert twin.supervised[np.isin(twin.ids, list(own))].any()


def _written(name):
    """Tokens that the family's processor writes for a picture."""
    beside = {"<end_of_utterance>", "<|turn>", "<turn|>", "<|video|>", "<s>", "</s>", "[INST]", "[/INST]"}
    beside |= {"[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_sentence|>"}
    beside |= {"<|startoftext|>", "<|header_start|>", "<|header_end|>", "<|eot|>"}
    return [one for one in FAMILIES[name].tokens if one not in beside and "audio" not in one]


def _widest_gap(name):
    """Tokens within a picture that are no control tokens of it: breaks of lines, and Idefics3's <global-img>."""
    return {"smolvlm": 3, "idefics3": 12}.get(name, 0)


def _runs(where, gap):
    places = np.flatnonzero(where)
    for group in np.split(places, np.flatnonzero(np.diff(places) > gap + 1) + 1):
        yield slice(group[0], group[-1] + 1)


def test_text_that_spells_out_a_mark_is_text(family):
    name, base, folder = family
    mark = "<start_of_image>" if name == "gemma3" else FAMILIES[name].image
    row = {
        "messages": [{"role": "user", "content": parts(f"say {mark}", "red")}, {"role": "assistant", "content": "x"}]
    }
    (batch,) = example_batches(prepared(base, folder, [row]).train, [0], Layout(0))
    alone = {"messages": [{"role": "user", "content": parts("say", "red")}, {"role": "assistant", "content": "x"}]}
    (other,) = example_batches(prepared(base, folder, [alone]).train, [0], Layout(0))
    assert int(batch.seen.sum()) == int(other.seen.sum()) > 0


def test_samples_name_each_picture_once(family):
    name, base, folder = family
    audit = prepared(base, folder, [RECORD]).audit
    shown = "".join(part.text for part in audit.samples[0].parts)
    for colour, (width, height) in SIZES.items():
        assert shown.count(f"{colour}.png: {width} x {height}") == 1
    assert audit.pictures == 3
    assert FAMILIES[name].image not in shown


LIMITS = {
    "gemma4": (70 * 48 * 48, 140 * 48 * 48),
    "gemma4_unified": (70 * 48 * 48, 140 * 48 * 48),
    "smolvlm": (32 * 32, 64 * 64),
    "mistral3": (64 * 64, 128 * 128),
    "internvl": (16 * 16, 4 * 16 * 16),
    "glm46v": (32 * 32, 64 * 64),
    "paddleocr_vl": (32 * 32, 64 * 64),
    "lfm2_vl": (2 * 16 * 16, 4 * 32 * 32),
    "llama4": (16 * 16, 4 * 16 * 16),
}


def test_a_budget_of_pixels_is_kept_or_refused(family):
    name, base, _ = family
    encoder = TextEncoder(load_tokenizer(base))
    if name not in (*LIMITS, "idefics3"):
        with raises_fault("SF-CONFIG-CONFLICT", "data.max_pixels"):
            read_processor(str(base), encoder, 100_000).tokens(50, 50)
        return
    small, large = LIMITS.get(name, LIMITS["smolvlm"])
    counts = [read_processor(str(base), encoder, most).tokens(400, 400) for most in (small, large)]
    assert counts[0] < counts[1]
    with raises_fault("SF-CONFIG-CONFLICT", "data.max_pixels"):
        read_processor(str(base), encoder, small - 1).tokens(50, 50)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_named_template_writes_pictures_where_they_stand(tmp_path, name):
    for colour, size in SIZES.items():
        picture(tmp_path / f"{colour}.png", colour, size)
    base = seeing_family(name, tmp_path / "base")
    template = {"llava": "chatml", "gemma3": "gemma"}[name]
    (batch,) = example_batches(prepared(base, tmp_path, [RECORD], template=template).train, [0], Layout(0))
    mark = "<start_of_image>" if name == "gemma3" else "<image>"
    turns = [
        turn | {"content": "".join(mark if part["type"] == "image" else part["text"] for part in turn["content"])}
        for turn in TURNS
    ]
    begin, end = {"llava": ("<|im_start|>", "<|im_end|>"), "gemma3": ("<start_of_turn>", "<end_of_turn>")}[name]
    roles = {"user": "user", "assistant": "model" if name == "gemma3" else "assistant"}
    text = "".join(f"{begin}{roles[turn['role']]}\n{turn['content']}{end}\n" for turn in turns)
    images = [Image.open(tmp_path / f"{colour}.png") for colour in SIZES]
    processor = reference(name, base)
    expected = processor(
        text=[processor.tokenizer.bos_token * (name == "gemma3") + text] if name == "gemma3" else [text],
        images=[images],
        add_special_tokens=False,
    )
    assert batch.input_ids[0].tolist() == expected["input_ids"][0]
    assert dict(batch.pixels[0])["pixel_values"].shape[0] == 3


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="with torchvision it opens")
def test_a_package_that_the_processor_needs_is_named(tmp_path):
    for name in ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast"):  # transformers says it in other words
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
        with raises_fault("SF-PACKAGE", str(tmp_path), "torchvision", remedy=["vision"]) as caught:
            check_max_pixels(tmp_path, 10**6)
        assert isinstance(caught.value, EnvironmentFault)


def test_texts_without_pictures_go_through_a_template_of_parts(family):
    _, base, folder = family
    turns = [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]
    ids = prepared(base, folder, [{"messages": turns}]).train[0].ids.tolist()
    tokenizer = AutoTokenizer.from_pretrained(base)
    listed = [turn | {"content": parts_of(turn["content"])} for turn in turns]
    text = tokenizer.apply_chat_template(listed, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def parts_of(text):
    return [{"type": "text", "text": text}]


def test_llava_next_counts_the_features_of_every_shape_as_transformers_does(tmp_path):
    base = seeing_family("llava_next", tmp_path / "base")
    found, processor = (
        read_processor(str(base), TextEncoder(load_tokenizer(base))),
        reference("llava_next", base),
    )
    sizes = [(height, width) for height in range(5, 120, 7) for width in range(5, 120, 11)]
    expected = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    assert [found.tokens(width, height) for height, width in sizes] == list(expected)
    assert len(set(expected)) > 4


COUNTED = {
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "gemma4": ("<|image|>",),
    "gemma4_unified": ("<|image|>",),
    "internvl": ("<img>", "<IMG_CONTEXT>", "</img>"),
    "glm46v": ("<|image|>",),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_others_count_the_features_of_every_shape_as_transformers_does(tmp_path, name):
    base = seeing_family(name, tmp_path / name)
    found, processor = read_processor(str(base), TextEncoder(load_tokenizer(base))), reference(name, base)
    sizes = [(height, width) for height in range(8, 400, 37) for width in range(8, 400, 41)]
    expected = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    texts = [found._text(width, height) for height, width in sizes]
    assert [sum(text.count(one) for one in COUNTED[name]) for text in texts] == list(expected)
    assert len(set(expected)) > 4


@pytest.mark.parametrize("name", ["lfm2_vl", "llama4"])
def test_what_is_written_for_every_shape_is_what_the_processor_writes_for_its_pixels(tmp_path, name):
    """Of the families whose processors count no tokens by size."""
    base = seeing_family(name, tmp_path / name)
    found, processor = read_processor(str(base), TextEncoder(load_tokenizer(base))), reference(name, base)
    written, refused = set(), 0
    for height, width in product(range(8, 300, 41), range(8, 300, 37)):
        images = [[Image.new("RGB", (width, height))]]
        try:
            made, (expected,) = processor._process_images(images, **ASKED[name])
            fits = len(made["pixel_values"][0]) == len(made.get("pixel_attention_mask", made["pixel_values"])[0])
        except RuntimeError:
            expected, fits = "", False
        if not fits:  # of a narrow picture more patches than the mask has places for, which no forward takes
            refused += 1
            with pytest.raises(RowFault):
                found.tokens(width, height)
            continue
        assert found._text(width, height) == expected
        written.add(expected)
    assert len(written) > 4
    assert bool(refused) == (name == "lfm2_vl")


ASKED = {"lfm2_vl": {"use_image_special_tokens": True, "return_row_col_info": True}, "llama4": {}}
