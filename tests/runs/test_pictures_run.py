"""Runs on pictures: loss and gradients beside transformers' own forward, exact resume, what is saved and refused."""

import io
import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import surefoot
from helpers.faults import raises_fault
from helpers.prepared import prepared
from helpers.seeing import picture, seeing
from helpers.seeing_families import seeing_family
from helpers.tiers import representatives
from surefoot.commands.main import main
from surefoot.data.batching.batch import IGNORE
from surefoot.data.batching.batch_file import batches_from_file, batches_to_file
from surefoot.data.batching.loader import Layout, example_batches, pair_batches
from surefoot.data.batching.subsets import longest_row
from surefoot.methods.losses.logprobs import adapter_off, frozen
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.load import load_model, load_tokenizer
from surefoot.models.wrapped import wrapper_parameters
from surefoot.report.footer import next_commands
from surefoot.training.evaluation import answer_examples

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
COLOURS = {"red": (56, 56), "blue": (84, 56), "green": (64, 96), "yellow": (112, 56)}
ASKED = {"type": "text", "text": "colour?"}
EACH = representatives(["qwen2_5_vl", "qwen3_vl", "qwen3_5"], "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def records(folder: Path) -> Path:
    for colour, size in COLOURS.items():
        picture(folder / f"{colour}.png", colour, size)
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [ASKED, {"type": "image", "path": f"{c}.png"}],
                },
                {"role": "assistant", "content": c},
            ]
        }
        for c in COLOURS
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"


def examples_of(base, folder, **changes):
    tokenizer = load_tokenizer(base)
    asked = {"max_length": 256, "bos_id": None, "pad_id": tokenizer.get_vocab().get("<|endoftext|>", 0)}
    return prepared(records(folder), tokenizer, folder / "cache", **asked | changes).train


def opened(base):
    return load_model(base, dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu"))


def expected(model, base, folder, batch, colours):
    """transformers' own loss, summed over the learned tokens: its forward on its processor's pixels."""
    from PIL import Image

    eye = AutoImageProcessor.from_pretrained(base, backend="pil")
    pixels = eye(images=[Image.open(folder / f"{colour}.png") for colour in colours], return_tensors="pt")
    labels = torch.cat((torch.full((len(batch.targets), 1), IGNORE), batch.targets[:, :-1]), dim=1)
    kinds = (batch.input_ids == model.config.image_token_id).int()
    found = model(input_ids=batch.input_ids, labels=labels, mm_token_type_ids=kinds, use_cache=False, **pixels)
    return found.loss * batch.weight


@pytest.mark.parametrize("name", EACH)
def test_loss_and_gradients_are_transformers_own(tmp_path, name):
    base = seeing(name, tmp_path / "base")
    data = examples_of(base, tmp_path)
    (batch,) = example_batches(data, range(4), Layout(0))
    order = [list(COLOURS)[int(number) - 1] for number in batch.examples]
    model = opened(base)
    reference = AutoModelForImageTextToText.from_pretrained(
        base, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    wanted = expected(reference, base, tmp_path, batch, order)
    wanted.backward()
    found = sft_loss(model, batch).loss
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=FP32_RELATIVE)
    theirs = {key: one.grad for key, one in reference.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in theirs.values())
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    for key, one in trained.items():
        assert float((one.grad - theirs[key]).abs().max()) <= FP32_RELATIVE * largest, key
    assert trained
    assert not trained.keys() & wrapper_parameters(reference).keys()
    assert any(
        key in wrapper_parameters(reference) and one.abs().max() > 0 for key, one in theirs.items()
    )  # it was looked at
    with torch.no_grad():
        for colour in ("red", "green"):  # twin: one picture's colour in another's place
            picture(tmp_path / f"{colour}.png", "white", COLOURS[colour])
        twin = expected(reference, base, tmp_path, batch, order)
        assert abs(twin.item() - wanted.item()) > 10 * FP32_RELATIVE * abs(wanted.item())
        blind = sft_loss(model, replace(batch, pictures=None, seen=None)).loss  # twin: no pixels
        assert abs(blind.item() - wanted.item()) > 10 * FP32_RELATIVE * abs(wanted.item())


def test_answers_of_an_evaluation_are_to_the_pictures(tmp_path):
    """The twin: without pixels they are others."""
    base = seeing("qwen2_5_vl", tmp_path / "base")
    data, model = examples_of(base, tmp_path), opened(base)
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim >= 2 else 1
    reference = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    reference.load_state_dict(model.state_dict())
    tokenizer = load_tokenizer(base)
    how = {"stop_ids": [], "pad_id": 0, "max_new_tokens": 5, "positions": 512, "rows": 4}
    answers = answer_examples(model, tokenizer, data, count=None, **how)
    blind = answer_examples(model, tokenizer, replace(data, processor=None), count=None, **how)
    for index, answer in enumerate(answers):
        example = data[index]
        batch = next(iter(example_batches(data, [index], Layout(0))))
        length = int(np.flatnonzero(example.supervised)[0])
        ids, seen = batch.input_ids[:, :length], batch.seen[:, :length]
        mask = torch.ones_like(ids)
        found = reference.generate(
            input_ids=ids, attention_mask=mask, mm_token_type_ids=seen, **dict(batch.pixels[0]), max_new_tokens=5,
            do_sample=False, eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        assert answer.answer == tokenizer.decode(found[0, length:], skip_special_tokens=True)
        assert Path(example.pictures[0].path).name in answer.prompt
    assert [one.answer for one in answers] != [one.answer for one in blind]


def test_rows_apart_sum_to_rows_together(tmp_path):
    base = seeing("qwen2_5_vl", tmp_path / "base")
    data, model = examples_of(base, tmp_path), opened(base)
    (together,) = example_batches(data, range(4), Layout(0))
    apart = example_batches(data, range(4), Layout(0, most=1))
    with torch.no_grad():
        alone = sum(sft_loss(model, one).loss.item() for one in apart)
        assert alone == pytest.approx(sft_loss(model, together).loss.item(), rel=FP32_RELATIVE)
        longest = max(apart, key=lambda one: one.tokens)
        assert sft_loss(model, longest_row(together)).loss.item() == pytest.approx(
            sft_loss(model, longest).loss.item(), rel=FP32_RELATIVE
        )


def test_a_batch_with_pictures_is_written_down_and_read(tmp_path):
    base = seeing("qwen2_5_vl", tmp_path / "base")
    (batch,) = example_batches(examples_of(base, tmp_path), range(4), Layout(0))
    (again,) = batches_from_file(*batches_to_file([batch]))
    assert torch.equal(again.seen, batch.seen)
    for one, other in zip(again.pixels, batch.pixels, strict=True):
        assert all(torch.equal(dict(one)[key], dict(other)[key]) for key in dict(other))


def config(folder: Path, run: str, **changes) -> dict:
    return {
        "stage": "sft",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 2, "dropout": 0.1},
        "data": {"train": str(folder / "d.jsonl"), "eval": 1},
        "batch": {"size": 2, "micro": 1},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "duration": "4 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(folder / run),
        **changes,
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name}:{key}": one for path in sorted(run.glob("*.safetensors")) for key, one in load_file(path).items()
    }


def trained_and_resumed(raw: dict, folder: Path) -> dict:
    """Train `whole`; a copy of it that was killed after step 2 and resumed has the same weights. Its config."""
    surefoot.train(raw, stream=io.StringIO())
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoint-4")
    (folder / "half" / "MANIFEST.json").unlink()
    half = raw | {"output": str(folder / "half")}
    surefoot.train(half, resume=True, stream=io.StringIO())
    whole, again = weights(folder / "whole"), weights(folder / "half")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    return half


def with_adapter(raw: dict, adapter: str) -> dict:
    """adapter: lora, or full for none."""
    own = {"adapter": {"kind": "lora", "rank": 2, "dropout": 0.1}} if adapter == "lora" else {}
    return {key: value for key, value in raw.items() if key != "adapter"} | own


@pytest.mark.parametrize("adapter", representatives(["lora", "full"], "full"))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, adapter):
    seeing("qwen2_5_vl", tmp_path / "base")
    records(tmp_path)
    half = trained_and_resumed(with_adapter(config(tmp_path, "whole"), adapter), tmp_path)
    audit = json.loads((tmp_path / "whole" / "data.json").read_text())
    assert audit["train"]["pictures"]["count"] == 3
    assert Path(audit["to_try"]["picture"]).stem in COLOURS
    asked = next(words for _, words in next_commands(tmp_path / "whole", **audit["to_try"]) if "--prompt" in words)
    shown = CliRunner().invoke(main, [*shlex.split(asked)[1:], "--max-new-tokens", "2"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "whole" / "preprocessor_config.json").read_bytes() == (
        tmp_path / "base" / "preprocessor_config.json"
    ).read_bytes()
    if adapter == "full":
        own, base = (
            load_file(tmp_path / "whole" / "model.safetensors"),
            load_file(tmp_path / "base" / "model.safetensors"),
        )
        tower = [key for key in base if "visual" in key]
        assert tower
        assert all(torch.equal(own[key], base[key]) for key in tower)
        assert not all(torch.equal(own[key], base[key]) for key in base)
    picture(tmp_path / "red.png", "white", COLOURS["red"])  # twin: another picture in the file's place
    with raises_fault("SF-RESUME-CHANGED", tmp_path / "half" / "checkpoint-2"):
        shutil.rmtree(tmp_path / "half" / "checkpoint-4")
        surefoot.train(half, resume=True, stream=io.StringIO())


def pairs(folder: Path) -> Path:
    records(folder)
    asked = [json.loads(line) for line in (folder / "d.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": one["messages"][:1], "chosen": one["messages"][1]["content"], "rejected": "none"} for one in asked
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"


@pytest.mark.parametrize("reference", representatives(["adapter", "copy"], "adapter"))
def test_a_resumed_dpo_run_is_the_uninterrupted_one(tmp_path, reference):
    seeing("qwen2_5_vl", tmp_path / "base")
    pairs(tmp_path)
    raw = config(tmp_path, "whole", stage="dpo", adapter={"kind": "lora", "rank": 2})
    if reference == "copy":
        raw.pop("adapter")
    trained_and_resumed(raw, tmp_path)
    assert json.loads((tmp_path / "whole" / "data.json").read_text())["train"]["pictures"]["count"] == 3
    logged = [json.loads(line) for line in (tmp_path / "whole" / "trainer_log.jsonl").read_text().splitlines()]
    first = next(one for one in logged if one.get("loss") is not None)
    assert first["loss"] == pytest.approx(math.log(2), rel=FP32_RELATIVE)  # the reference sees what the policy sees


def alike(folder: Path) -> Path:
    """Pairs with the same texts beside pictures of one size, and one with two pictures."""
    for colour in COLOURS:
        picture(folder / f"{colour}.png", colour, (56, 56))
    shown = [[colour] for colour in COLOURS] + [["red", "blue"]]
    rows = [
        {
            "prompt": [{"role": "user", "content": [ASKED, *({"type": "image", "path": f"{c}.png"} for c in own)]}],
            "chosen": "red",
            "rejected": "none",
        }
        for own in shown
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"


@pytest.mark.slow
def test_cached_log_probabilities_are_those_of_a_reference_in_memory(tmp_path, monkeypatch):
    """Computed in one run, and checked and found by the next, in a batch for each number of pictures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seeing_family("mllama", tmp_path / "base")
    alike(tmp_path)
    found = {}
    for name, reference in {"memory": "auto", "first": "cached", "second": "cached"}.items():
        changes = {"alignment": {"reference": reference}, "adapter": {"kind": "lora", "rank": 2}}
        surefoot.train(config(tmp_path, name, stage="dpo", **changes), stream=io.StringIO())
        logged = (tmp_path / name / "trainer_log.jsonl").read_text().splitlines()
        found[name] = [row["loss"] for row in map(json.loads, logged) if row.get("loss") is not None]
    assert found["second"] == found["first"] == pytest.approx(found["memory"], rel=FP32_RELATIVE)


def test_a_reference_below_the_adapter_is_the_base_on_the_same_pictures(tmp_path):
    base = seeing("qwen2_5_vl", tmp_path / "base")
    pairs(tmp_path)
    tokenizer = load_tokenizer(base)
    data = prepared(tmp_path / "d.jsonl", tokenizer, tmp_path / "cache", max_length=256, kind="pairs").train
    (batch,) = pair_batches(data, range(4), Layout(0))
    policy = get_peft_model(opened(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    found, wanted = adapter_off(policy)(batch.rows), frozen(opened(base))(batch.rows)
    assert torch.equal(found, wanted)
    assert not torch.allclose(frozen(policy)(batch.rows), wanted, rtol=1e-3)
    blind = replace(batch.rows, pictures=None, seen=None)  # twin: the reference sees nothing
    assert not torch.allclose(adapter_off(policy)(blind), wanted, rtol=FP32_RELATIVE)


def test_other_stages_refuse_pictures_with_the_row(tmp_path):
    seeing("qwen2_5_vl", tmp_path / "base")
    pairs(tmp_path)
    raw = config(tmp_path, "run", stage="ppo", ppo={"reward": f"{__file__}:records"})
    with raises_fault("SF-DATA-PICTURE", f"{tmp_path / 'd.jsonl'}:1", 1):
        surefoot.train(raw, stream=io.StringIO())


def test_packing_is_refused_with_pictures(tmp_path):
    seeing("qwen2_5_vl", tmp_path / "base")
    records(tmp_path)
    raw = config(tmp_path, "run")
    raw["data"] |= {"packing": "on"}
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        surefoot.train(raw, stream=io.StringIO())
