"""Runs on pictures of each family: loss and gradients beside transformers' own forward, exact resume, what is saved."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from helpers.seeing_families import FAMILIES, reference, seeing_family
from helpers.tiers import representatives
from runs.test_pictures_run import (
    COLOURS,
    FP32_RELATIVE,
    config,
    examples_of,
    opened,
    trained_and_resumed,
    with_adapter,
)
from surefoot.data.batching.batch import IGNORE
from surefoot.data.batching.loader import Layout, example_batches
from surefoot.families.vision_parts import part_of
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.facts import module_tree
from surefoot.models.load import load_tokenizer
from surefoot.models.wrapped import wrapper_parameters

SEEN_BOTH_WAYS = ("gemma3", "gemma4", "gemma4_unified")
READ_BY_PLACE = (*SEEN_BOTH_WAYS, "glm46v", "mllama", "paddleocr_vl")  # whose forward is told where pictures stand


def data_of(base, folder):
    return examples_of(base, folder, max_length=4096, bos_id=load_tokenizer(base).bos_token_id)


def batch_of(base, folder):
    (batch,) = example_batches(data_of(base, folder), range(4), Layout(0))
    return batch


def expected(model, name, base, folder, batch, **changes):
    """transformers' own loss, summed over the learned tokens: its processor's inputs through its forward."""
    from PIL import Image

    colours = [list(COLOURS)[int(number) - 1] for number in batch.examples]
    processor = reference(name, base)
    turns = [
        [
            {"role": "user", "content": [{"type": "text", "text": "colour?"}, {"type": "image"}]},
            {"role": "assistant", "content": [{"type": "text", "text": colour}]},
        ]
        for colour in colours
    ]
    texts = [processor.tokenizer.apply_chat_template(one, tokenize=False) for one in turns]
    images = [[Image.open(folder / f"{colour}.png")] for colour in colours]
    how = {"add_special_tokens": False, "padding": True, "padding_side": "right", "return_tensors": "pt"}
    inputs = processor(text=texts, images=images, **how)
    inputs["pixel_values"] = inputs["pixel_values"].float()  # which transformers' loader leaves in bf16 for Llama 4
    inputs.pop("num_crops", None), inputs.pop("num_soft_tokens_per_image", None)
    labels = torch.cat((torch.full((len(batch.targets), 1), IGNORE), batch.targets[:, :-1]), dim=1)
    return model(**(dict(inputs) | changes), labels=labels, use_cache=False).loss * batch.weight


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_transformers_own(tmp_path, name):
    """Of the rows together; apart they sum to the same loss."""
    base = seeing_family(name, tmp_path / "base")
    data, model = data_of(base, tmp_path), opened(base)
    (batch,) = example_batches(data, range(4), Layout(0))
    theirs = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
    wanted = expected(theirs, name, base, tmp_path, batch)
    wanted.backward()
    found = sft_loss(model, batch).loss
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=FP32_RELATIVE)
    gradients = {key: one.grad for key, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in gradients.values())
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad and one.grad is not None}
    for key, one in trained.items():
        assert float((one.grad - gradients[key]).abs().max()) <= FP32_RELATIVE * largest, key
    assert trained
    assert not trained.keys() & wrapper_parameters(theirs).keys()
    assert any(
        key in wrapper_parameters(theirs) and one.abs().max() > 0 for key, one in gradients.items()
    )  # it was looked at
    with torch.no_grad():
        alone = sum(sft_loss(model, one).loss.item() for one in example_batches(data, range(4), Layout(0, most=1)))
        assert alone == pytest.approx(found.item(), rel=FP32_RELATIVE)
        blind = sft_loss(model, replace(batch, pictures=None, seen=None)).loss  # twin: no pixels
        assert abs(blind.item() - wanted.item()) > 10 * FP32_RELATIVE * abs(wanted.item())
        one_way = sft_loss(model, replace(batch, seen=torch.zeros_like(batch.seen))).loss  # twin: no kinds of tokens
        differs = abs(one_way.item() - wanted.item()) > 10 * FP32_RELATIVE * abs(wanted.item())
        assert differs == (name in READ_BY_PLACE)


@pytest.mark.parametrize(
    ("name", "adapter"), representatives(product(FAMILIES, ("lora", "full")), ("gemma3", "lora"), ("smolvlm", "full"))
)
def test_a_resumed_run_is_the_uninterrupted_one_and_reloads(tmp_path, name, adapter):
    base = seeing_family(name, tmp_path / "base")
    batch = batch_of(base, tmp_path)
    raw = config(tmp_path, "whole")
    raw["data"] |= {"max_length": 512}
    raw = with_adapter(raw, adapter)
    trained_and_resumed(raw, tmp_path)
    folder = tmp_path / "whole"
    for file in ("preprocessor_config.json", "processor_config.json"):
        assert json.loads((folder / file).read_text()) == json.loads((base / file).read_text())
    kind = AutoModelForImageTextToText
    plain = kind.from_pretrained(
        base if adapter == "lora" else folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    if adapter == "lora":
        plain = PeftModel.from_pretrained(plain, str(folder)).eval()
    else:
        own, before = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
        assert own.keys() == before.keys()
        tower = [key for key in before if part_of(key)]
        assert tower
        assert all(torch.equal(own[key], before[key]) for key in tower)
    assert plain.training is False
    with torch.no_grad():
        trained = expected(plain, name, folder, tmp_path, batch).item()
        untrained = sft_loss(opened(base), batch).loss.item()
    assert trained < untrained


@pytest.mark.parametrize("name", FAMILIES)
def test_whose_pictures_are_seen_both_ways_is_read_from_the_model(tmp_path, name):
    assert module_tree(seeing_family(name, tmp_path / name)).both_ways == (name in SEEN_BOTH_WAYS)
    if name != "gemma4":
        return
    path = tmp_path / "gemma4" / "config.json"  # twin: as small Gemma 4 are
    settings = json.loads(path.read_text())
    settings["text_config"]["use_bidirectional_attention"] = None
    path.write_text(json.dumps(settings))
    assert not module_tree(path.parent).both_ways
