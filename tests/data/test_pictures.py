"""Pictures of records: layouts, faults, ids and pixels beside transformers' own processor, labels, the cache."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor

from helpers.faults import raises_fault
from helpers.prepared import prepared
from helpers.seeing import picture, seeing
from surefoot.commands.main import main
from surefoot.data.batching.loader import Layout, example_batches, own_batches, pair_batches
from surefoot.data.formats import RowFault
from surefoot.data.sources.resolve import SourceSpec
from surefoot.data.tokenize import picture_processor, tokenize_file
from surefoot.data.tokenize.picture_processor import read_processor
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.methods.preference import all_judged
from surefoot.models.load import load_tokenizer
from surefoot.system.errors import Fault, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return seeing("qwen2_5_vl", tmp_path_factory.mktemp("seeing") / "base")


@pytest.fixture
def prepare(base, tmp_path):
    def prepare(rows, *, evaluation=None, tokenizer=None, source=None, **asked):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [SourceSpec(str(source or tmp_path / "d.jsonl"))]
        return prepared(sources, tokenizer or load_tokenizer(base), tmp_path / "cache", evaluation, **asked)

    picture(tmp_path / "red.png", "red", (56, 56))
    picture(tmp_path / "blue.png", "blue", (84, 56))
    return prepare


def parts(*given):
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]


RED, BLUE = {"type": "image", "image": "red.png"}, {"type": "image", "path": "blue.png"}
ASKED = "which of "
LAYOUTS = {
    "messages": {"messages": [{"role": "user", "content": parts(ASKED, RED, " and ", BLUE, "?")}]},
    "url": {
        "messages": [
            {
                "role": "user",
                "content": parts(ASKED, {"type": "image_url", "image_url": {"url": "red.png"}}, " and ", BLUE, "?"),
            }
        ]
    },
    "v1": {  # of LLaMA-Factory
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "value": ASKED},
                    {"type": "image_url", "value": "red.png"},
                    {"type": "text", "value": " and "},
                    {"type": "image_url", "value": "blue.png"},
                    {"type": "text", "value": "?"},
                ],
                "loss_weight": 0.0,
            }
        ]
    },
    "trl": {
        "messages": [{"role": "user", "content": parts(ASKED, {"type": "image"}, " and ", {"type": "image"}, "?")}],
        "images": ["red.png", "blue.png"],
    },
    "marks": {
        "messages": [{"role": "user", "content": f"{ASKED}<image> and <image>?"}],
        "images": ["red.png", "blue.png"],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": f"{ASKED}<image> and <image>?"}],
        "images": ["red.png", "blue.png"],
    },
    "alpaca": {"instruction": f"{ASKED}<image> and <image>?", "images": ["red.png", "blue.png"]},
}


def answered(record, answer="red"):
    if "instruction" in record:
        return record | {"output": answer}
    name = "messages" if "messages" in record else "conversations"
    turn = {"role": "assistant", "content": answer} if name == "messages" else {"from": "gpt", "value": answer}
    return record | {name: [*record[name], turn]}


def theirs(base, monkeypatch):
    """transformers' whole processor. Its video half needs torchvision, and is not asked."""
    monkeypatch.setattr(Qwen2_5_VLProcessor, "check_argument_for_proper_class", lambda *given: None)
    video = type("NoVideo", (), {"merge_size": 2, "temporal_patch_size": 2, "model_input_names": ()})()
    tokenizer = AutoTokenizer.from_pretrained(base)
    eye = AutoImageProcessor.from_pretrained(base, backend="pil")
    return Qwen2_5_VLProcessor(eye, tokenizer, video, chat_template=tokenizer.chat_template)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_ids_and_pixels_of_transformers_processor(base, prepare, tmp_path, monkeypatch, name):
    data = prepare([answered(LAYOUTS[name])]).train
    (batch,) = example_batches(data, [0], Layout(0))
    processor = theirs(base, monkeypatch)
    turns = [
        {"role": "user", "content": parts(ASKED, {"type": "image"}, " and ", {"type": "image"}, "?")},
        {"role": "assistant", "content": "red"},
    ]
    text = processor.apply_chat_template(turns, tokenize=False)
    images = [Image.open(tmp_path / f"{colour}.png") for colour in ("red", "blue")]
    expected = processor(text=[text], images=images, return_tensors="pt")
    assert batch.input_ids.tolist() == expected["input_ids"].tolist()
    assert torch.equal(batch.seen.long(), expected["mm_token_type_ids"].long())
    found = dict(batch.pixels[0])
    assert set(found) == {"pixel_values", "image_grid_thw"}
    assert all(torch.equal(found[key], expected[key]) for key in found)
    twin = processor(text=[text], images=images[::-1], return_tensors="pt")  # one picture in the other's place
    assert not all(torch.equal(found[key], twin[key]) for key in found)


def test_no_token_of_a_picture_is_learned_whatever_else_is(prepare, monkeypatch):
    data = prepare([answered(LAYOUTS["messages"])], train_on="everything").train
    example, ids = data[0], data.processor.ids
    assert not example.supervised[np.isin(example.ids, ids)].any()
    assert example.supervised[~np.isin(example.ids, ids)].sum() == (~np.isin(example.ids, ids)).sum() - 1
    none = lambda self, ids, pictures: np.zeros(len(ids), dtype=bool)  # noqa: E731
    monkeypatch.setattr(picture_processor.PictureProcessor, "within", none)  # twin: labels on the pictures' tokens
    twin = prepare([answered(LAYOUTS["messages"], "blue")], train_on="everything").train[0]
    assert twin.supervised[np.isin(twin.ids, ids)].any()


def test_text_that_spells_out_a_pictures_tokens_is_text(prepare):
    row = {"messages": [{"role": "user", "content": parts("say <|image_pad|>", RED)}]}
    (batch,) = example_batches(prepare([answered(row)]).train, [0], Layout(0))
    assert int(batch.seen.sum()) == 4


def test_rows_keep_their_own_pictures(prepare):
    rows = [LAYOUTS["messages"], {"messages": [{"role": "user", "content": "none?"}]}, LAYOUTS["marks"]]
    data = prepare([answered(row) for row in rows]).train
    batches = example_batches(data, [1, 0, 2], Layout(0))
    assert [[bool(own) for own in one.pixels] for one in batches] == [[True, True, False]]
    assert prepare([answered(rows[1])]).train.processor is not None
    assert example_batches(prepare([answered(rows[1])]).train, [0], Layout(0))[0].pixels == ()


def bad(tmp_path):
    good = BytesIO()
    Image.new("RGB", (300, 300), "red").save(good, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(good.getvalue()[:-400])
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    bomb = BytesIO()
    Image.new("1", (9000, 9000)).save(bomb, "PNG")
    (tmp_path / "bomb.png").write_bytes(bomb.getvalue())
    picture(tmp_path / "thin.png", "red", (500, 1))


@pytest.mark.parametrize(
    "path", ["gone.png", "cut.jpg", "words.png", "folder.png", "bomb.png", "thin.png", "https://example.org/a.png"]
)
def test_a_bad_picture_is_one_line_with_row_and_file(prepare, tmp_path, path):
    bad(tmp_path)
    row = {"messages": [{"role": "user", "content": parts("?", {"type": "image", "image": path})}]}
    with raises_fault("SF-DATA-PICTURE", f"{tmp_path / 'd.jsonl'}:2", 2, path):
        prepare([answered(LAYOUTS["messages"]), answered(row)])


COUNTS = {
    "one more": {"messages": [{"role": "user", "content": "<image>"}], "images": ["red.png", "blue.png"]},
    "one less": {"messages": [{"role": "user", "content": "<image><image>"}], "images": ["red.png"]},
    "no place": {"messages": [{"role": "user", "content": "what?"}], "images": ["red.png"]},
    "empty": {"messages": [{"role": "user", "content": "<image>"}], "images": []},
    "no path": {"messages": [{"role": "user", "content": "<image>"}], "images": [7]},
    "nowhere": {"messages": [{"role": "user", "content": parts("?", {"type": "image"})}]},
}


def test_another_template_is_offered_for_texts_and_not_for_pictures(prepare, tmp_path, monkeypatch):
    row = answered({"messages": [{"role": "user", "content": parts("?", {"type": "image", "image": "gone.png"})}]})

    def offers():
        with pytest.raises(InputError) as caught:
            prepare([row])
        return "chatml" in caught.value.faults[0].fix

    def refuses(*given):
        raise InputError(Fault(f"{tmp_path / 'd.jsonl'}:1", "a turn", code="SF-DATA-ROW"))

    assert not offers()
    picture(tmp_path / "gone.png", "red", (56, 56))
    monkeypatch.setattr(tokenize_file, "encode", refuses)
    assert offers()


@pytest.mark.parametrize("name", COUNTS)
def test_places_and_pictures_must_come_out_even(prepare, tmp_path, name):
    with raises_fault("SF-DATA-PICTURE", f"{tmp_path / 'd.jsonl'}:1"):
        prepare([answered(COUNTS[name])])


@pytest.mark.parametrize("name", ["messages", "marks", "sharegpt"])
def test_a_model_that_does_not_see_refuses_pictures(base, prepare, tmp_path, name):
    blind = load_tokenizer(base)
    blind.name_or_path = ""
    with raises_fault("SF-DATA-PICTURE", f"{tmp_path / 'd.jsonl'}:1"):
        prepare([answered(LAYOUTS[name])], tokenizer=blind)
    with raises_fault("SF-CONFIG-CONFLICT", "data.max_pixels"):
        prepare([answered(LAYOUTS[name])], tokenizer=blind, max_pixels=5000)
    field_of_another_kind = answered({"messages": [{"role": "user", "content": "what?"}], "images": [{"n": 1}]})
    assert len(prepare([field_of_another_kind], tokenizer=blind).train) == 1


def test_what_is_not_built_is_refused(prepare, tmp_path):
    where = f"{tmp_path / 'd.jsonl'}:1"
    with raises_fault("SF-DATA-PICTURE", where):
        prepare([answered(LAYOUTS["messages"])], encoding="whole")
    asked = LAYOUTS["messages"]["messages"]
    others = {
        "pairs": {"prompt": asked, "chosen": "red", "rejected": "blue"},
        "judged": {"prompt": asked, "completion": "red", "label": True},
        "prompts": {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["red.png"]},
    }
    for kind, row in others.items():
        with raises_fault("SF-DATA-PICTURE", where):
            prepare([row], kind=kind, pictures=False)
    learned = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": parts("so:", RED)}]}
    with raises_fault("SF-DATA-PICTURE", where):
        prepare([learned])


def as_table(path, rows):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the data extra")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def in_bytes(tmp_path, name, **more):
    return {"bytes": (tmp_path / name).read_bytes(), "path": name} | more


TABLES = ["list", "one column", "parts", "names alone"]


def table_row(tmp_path, name):
    cells = [in_bytes(tmp_path, "red.png"), in_bytes(tmp_path, "blue.png", path=None)]
    if name == "parts":
        shown = [{"type": "image", "image": one} for one in cells]
        return {"messages": [{"role": "user", "content": parts(ASKED, shown[0], " and ", shown[1], "?")}]}
    if name == "one column":
        return {"messages": [{"role": "user", "content": "<image>?"}], "images": cells[0]}
    if name == "names alone":
        cells = [{"bytes": None, "path": "red.png"}, {"bytes": None, "path": "blue.png"}]
    return {"messages": LAYOUTS["trl"]["messages"], "images": cells}


@pytest.mark.parametrize("name", TABLES)
def test_bytes_in_a_table_are_the_pictures_of_files(prepare, tmp_path, name):
    row = answered(table_row(tmp_path, name))
    if isinstance(row["messages"][0]["content"], list):  # Arrow's lists are of one type
        row["messages"][1]["content"] = parts("red")
    table = as_table(tmp_path / "d.parquet", [row])
    found = prepare([], source=table).train
    same = LAYOUTS["marks"] if name != "one column" else {**row, "images": ["red.png"]}
    wanted = prepare([answered(same) if name != "one column" else same]).train
    assert found[0].ids.tolist() == wanted[0].ids.tolist()
    for data in (found, prepare([], source=table).train):  # the second from the cache
        (batch,), (other,) = (example_batches(one, [0], Layout(0)) for one in (data, wanted))
        assert all(torch.equal(one, dict(other.pixels[0])[key]) for key, one in batch.pixels[0])
    if name == "names alone":
        return
    kept = sorted((tmp_path / "cache" / "pictures").iterdir())
    assert [one.read_bytes() for one in kept if one.name.endswith("-red.png")] == [(tmp_path / "red.png").read_bytes()]
    for one in kept:
        one.unlink()
    again = prepare([], source=table).train
    assert torch.equal(
        dict(example_batches(again, [0], Layout(0))[0].pixels[0])["pixel_values"], dict(batch.pixels[0])["pixel_values"]
    )


def test_questions_of_the_cauldron_have_their_pictures_before_the_first(prepare, tmp_path):
    """As torchtune reads them (TheCauldronToMessages); its columns are Parquet's, with pictures in bytes."""
    asked = [{"user": "which?", "assistant": "the red one", "source": "x"}, {"user": "why?", "assistant": "it is red"}]
    cells = [in_bytes(tmp_path, "red.png"), in_bytes(tmp_path, "blue.png", path=None)]
    table = as_table(tmp_path / "d.parquet", [{"images": cells, "texts": asked}])
    data = prepare([], source=table)
    assert data.audit.source.layout == "cauldron"
    turns = [{"role": role, "content": pair[role]} for pair in asked for role in ("user", "assistant")]
    turns[0]["content"] = parts(RED, BLUE, "which?")
    wanted = prepare([{"messages": turns}]).train
    assert data.train[0].ids.tolist() == wanted[0].ids.tolist()
    assert data.train[0].supervised.tolist() == wanted[0].supervised.tolist()
    (batch,), (other,) = (example_batches(one, [0], Layout(0)) for one in (data.train, wanted))
    assert all(torch.equal(one, dict(other.pixels[0])[key]) for key, one in batch.pixels[0])
    marked = {"images": ["red.png", "blue.png"], "texts": [{"user": "<image> or <image>?", "assistant": "the first"}]}
    twin = {"messages": [{"role": "user", "content": parts(RED, " or ", BLUE, "?")}]}
    twin["messages"].append({"role": "assistant", "content": "the first"})
    assert prepare([marked]).train[0].ids.tolist() == prepare([twin]).train[0].ids.tolist()
    for broken in ({"texts": []}, {"texts": ["a"]}, {"texts": [{"user": "?", "assistant": ""}]}):
        with raises_fault("SF-DATA-ROW", f"{tmp_path / 'd.jsonl'}:1"):
            prepare([marked | broken])


def test_a_rank_reads_the_pictures_of_its_own_batches_once_and_before_they_are_used(prepare, tmp_path, monkeypatch):
    texts = ({"messages": [{"role": "user", "content": parts(f"{word} ", RED)}]} for word in "abcde")
    data, read = prepare([answered(row) for row in texts]).train, []
    whole = data.processor.pixels
    monkeypatch.setattr(data.processor, "pixels", lambda pictures: read.append(pictures) or whole(pictures))
    of_step = lambda step: example_batches(data, range(5), Layout(0, most=1))  # noqa: E731
    batches = [own_batches(of_step, rank, 2)(1) for rank in range(2)]
    assert [len(own) for own in batches] == [3, 3]
    assert len(read) == 6  # the sixth for a batch without weight, which the others wait for
    (tmp_path / "red.png").unlink()
    assert all(dict(one.pixels[0])["pixel_values"].any() for own in batches for one in own)
    with pytest.raises(InputError):  # twin: as a step has them
        _ = of_step(1)[0].pixels


def test_ranks_see_at_the_same_time(prepare):
    """Else some wait in the collectives of a vision tower that the others skip."""
    seen = [answered({"messages": [{"role": "user", "content": parts(f"{word} ", RED)}]}) for word in "abc"]
    blind = answered({"messages": [{"role": "user", "content": "and what is this, and that?"}]})
    data = prepare([*seen[:2], blind, *seen[2:]]).train

    def rounds(layout):
        found = example_batches(data, range(4), layout)
        assert sum(len(one.examples) for one in found) == 4
        shown = [one.pictures is not None for one in found]
        return [set(shown[place : place + 2]) for place in range(0, len(shown), 2)]

    assert rounds(Layout(0, most=1, ranks=2, alike=True)) == [{True}, {True}, {False}]
    assert rounds(Layout(0, most=4, ranks=2, alike=True)) == [{True}, {False}]  # of one micro-batch each, and a blank
    assert {True, False} in rounds(Layout(0, most=1, ranks=2))  # twin


def test_ranks_see_judged_answers_at_the_same_time(prepare):
    """Also at the borders of the groups in which an evaluation pairs prompts with other answers."""
    shown = [{"role": "user", "content": parts("this? ", RED)}]
    blind = [{"role": "user", "content": "and that?"}]
    asked = (shown, shown, blind, shown, shown, blind)
    rows = [{"prompt": one, "completion": word, "label": True} for one, word in zip(asked, "abcdef", strict=True)]
    data = prepare(rows, kind="judged").train

    def rounds(layout):
        found = list(all_judged(data, layout, size=3))
        assert sum(len(one.examples) for one in found) == 6
        assert all((one.others.pictures is None) == (one.rows.pictures is None) for one in found)
        seen = [one.rows.pictures is not None for one in found]
        return [set(seen[place : place + 2]) for place in range(0, len(seen), 2)]

    assert all(len(one) == 1 for one in rounds(Layout(0, most=1, ranks=2, alike=True)))
    assert any(len(one) == 2 for one in rounds(Layout(0, most=1, ranks=2)))  # twin


def test_a_judged_answer_that_is_too_long_goes_with_its_pictures(prepare):
    """Half a picture means nothing. The record's list of pictures is read."""
    row = {"prompt": LAYOUTS["marks"]["messages"], "images": LAYOUTS["marks"]["images"], "label": True}
    found = prepare([row | {"completion": words} for words in ("red", "blue " * 100)], kind="judged", max_length=60)
    assert [one[1] for one in found.audit.source.dropped] == [2]
    assert (found.audit.pictures, found.audit.source.unused) == (2, ())


def test_bytes_that_are_no_picture_are_refused_with_their_row(prepare, tmp_path):
    rows = [answered(table_row(tmp_path, "one column")) for _ in range(2)]
    rows[1]["images"] = {"bytes": b"no picture", "path": "words.png"}
    table = as_table(tmp_path / "d.parquet", rows)
    with raises_fault("SF-DATA-PICTURE", f"{table}:2", 2):
        prepare([], source=table)
    table = as_table(tmp_path / "d.parquet", [rows[0] | {"sound": b"abc"}])
    with raises_fault("SF-DATA-ROW", f"{table}:1"):  # other bytes are no pictures
        prepare([], source=table)


PAIRS = {
    "parts": {"prompt": LAYOUTS["messages"]["messages"], "chosen": "red", "rejected": "blue"},
    "marks": {**LAYOUTS["marks"], "prompt": LAYOUTS["marks"]["messages"], "chosen": "red", "rejected": "blue"},
    "sharegpt": {**LAYOUTS["sharegpt"]}
    | {"chosen": {"from": "gpt", "value": "red"}, "rejected": {"from": "gpt", "value": "blue"}},
    "whole": {
        "images": ["red.png", "blue.png"],
        "chosen": answered(LAYOUTS["trl"])["messages"],
        "rejected": answered(LAYOUTS["trl"], "blue")["messages"],
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_answers_of_a_pair_are_to_the_same_pictures(prepare, name):
    row = {key: one for key, one in PAIRS[name].items() if key != "messages"}
    found = prepare([row], kind="pairs")
    (batch,) = pair_batches(found.train, [0], Layout(0))
    (alone,) = example_batches(prepare([answered(LAYOUTS["messages"])]).train, [0], Layout(0))
    better, worse = batch.rows.pixels
    assert dict(better).keys() == dict(alone.pixels[0]).keys()
    for key, one in alone.pixels[0]:
        assert torch.equal(dict(better)[key], one)
        assert torch.equal(dict(worse)[key], one)
    assert batch.rows.seen.sum(dim=1).tolist() == [10, 10]
    assert (found.audit.pictures, found.audit.picture_tokens) == (2, 10)
    learned = batch.rows.targets[batch.rows.targets >= 0]
    assert not np.isin(learned.numpy(), found.train.processor.ids).any()
    if name != "marks":
        return
    long = row | {"rejected": "blue " * 100}  # half a picture means nothing
    assert [one[1] for one in prepare([row, long], kind="pairs", max_length=60).audit.source.dropped] == [2]


def test_a_smaller_budget_gives_fewer_tokens_and_too_long_records_go_whole(prepare, tmp_path):
    picture(tmp_path / "red.png", "red", (200, 200))
    row = answered({"messages": [{"role": "user", "content": parts("?", RED)}]})
    large, small = prepare([row]).train, prepare([row], max_pixels=56 * 56).train
    assert [next(data.pictures())[1][0].tokens for data in (large, small)] == [49, 4]
    both = prepare([row, answered({"messages": [{"role": "user", "content": "none?"}]})], max_length=40)
    assert [place[1] for place in both.audit.source.dropped] == [1]
    assert both.audit.pictures == 0
    with raises_fault("SF-CONFIG-CONFLICT", "data.max_pixels", "100"):
        prepare([row], max_pixels=100)


@pytest.mark.parametrize(("most", "ends"), [(28 * 28, 0), (28 * 28 - 1, 2)])
def test_the_plan_refuses_a_budget_below_the_processors(tmp_path, most, ends):
    base = seeing("qwen2_5_vl", tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(json.dumps({"instruction": "?", "output": "a"}) + "\n")
    data = {"train": str(tmp_path / "data.jsonl"), "max_pixels": most}
    config = {"stage": "sft", "model": str(base), "data": data, "output": str(tmp_path / "run")}
    (tmp_path / "see.yaml").write_text(json.dumps(config))
    done = CliRunner().invoke(main, ["plan", str(tmp_path / "see.yaml")])
    assert done.exit_code == ends, done.output
    assert ("[SF-CONFIG-CONFLICT]" in done.stderr) == bool(ends)


def test_the_audit_counts_and_names_pictures(prepare):
    audit = prepare([answered(LAYOUTS["messages"])]).audit
    assert (audit.pictures, audit.picture_tokens) == (2, 4 + 6)
    shown = "".join(part.text for part in audit.samples[0].parts)
    assert "red.png: 56 x 56" in shown
    assert "<|image_pad|>" not in shown


def test_copies_are_of_pictures_too(prepare, tmp_path):
    same = {"messages": [{"role": "user", "content": parts("?", RED)}]}
    other = {"messages": [{"role": "user", "content": parts("?", {"type": "image", "image": "green.png"})}]}
    picture(tmp_path / "green.png", "green", (56, 56))
    assert prepare([answered(same), answered(other)]).audit.duplicates == 0
    assert prepare([answered(same), answered(same)]).audit.duplicates == 1


def test_the_cache_knows_a_changed_picture_and_a_batch_refuses_one(prepare, tmp_path):
    row = answered({"messages": [{"role": "user", "content": parts("?", RED)}]})
    first = prepare([row])
    assert prepare([row]).audit.source.content == first.audit.source.content
    picture(tmp_path / "red.png", "green", (56, 84))
    with raises_fault("SF-DATA-PICTURE", tmp_path / "red.png"):
        own_batches(lambda step: example_batches(first.train, [0], Layout(0)))(1)
    again = prepare([row])
    assert again.audit.source.content != first.audit.source.content
    assert next(again.train.pictures())[1][0].tokens == 6


def test_a_picture_on_its_side_is_turned(base, tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (84, 56), "red").save(tmp_path / "side.jpg", exif=turned)
    found = read_processor(str(base), TextEncoder(load_tokenizer(base)))
    looked = found.look("side.jpg", tmp_path)
    assert (looked.width, looked.height, looked.tokens) == (56, 84, 6)
    assert dict(found.pixels([looked]))["image_grid_thw"].tolist() == [[1, 6, 4]]


def test_a_path_may_be_that_from_the_working_directory(base, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    picture(tmp_path / "data" / "near.png", "red", (56, 56))
    picture(tmp_path / "far.png", "red", (84, 56))
    picture(tmp_path / "near.png", "red", (84, 56))
    found = read_processor(str(base), TextEncoder(load_tokenizer(base)))
    monkeypatch.chdir(tmp_path)
    assert [found.look(name, Path("data")).width for name in ("near.png", "far.png")] == [
        56,
        84,
    ]  # beside the file first
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(RowFault):  # neither
        found.look("far.png", tmp_path / "data")


def test_a_model_of_another_family_has_no_sight(base, tmp_path):
    path = tmp_path / "other"
    path.mkdir()
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    encoder = TextEncoder(load_tokenizer(base))
    assert read_processor(str(path), encoder) is None
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast"}))
    assert read_processor(str(path), encoder) is not None
    with pytest.raises(InputError):
        read_processor(str(tmp_path), encoder, 100_000)
