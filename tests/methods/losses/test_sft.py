"""The SFT loss: HF's own loss and gradients, and independence from how a batch is laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import IGNORE, Batch, Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in this tiny model.
FP32_RELATIVE = 1e-5
# bf16 keeps 8 bits: 4e-3 per operation, averaged over about 60 tokens.
BF16_RELATIVE = 2e-2
KINDS = ["full", "lora", "dora"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("sft")
    return {tied: tiny_llama(root / f"tied-{tied}", tied=tied) for tied in (True, False)}


def model_of(folder: Path, kind: str = "full"):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    if kind == "full":
        return model
    model = add_adapter(model, adapter_plan(linear_names(model), kind), seed=1, base="base").train()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:  # off the start, where B = 0 and A has no gradient
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def examples(*lengths: int) -> list[Example]:
    """A prompt that is not learned, then an answer that is."""
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(1, 300, length), np.arange(length) >= length // 3, number)
        for number, length in enumerate(lengths)
    ]


EXAMPLES = examples(9, 23, 17, 5)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def ours(model, *batches: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over all batches and its gradients, accumulated as the training step does."""
    weight = sum(batch.weight for batch in batches)
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = sft_loss(model, batch).loss / weight
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def huggingface(model, side: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model's own loss from labels, which it shifts itself."""
    longest = max(len(example.ids) for example in EXAMPLES)
    ids, labels = np.zeros((len(EXAMPLES), longest), int), np.full((len(EXAMPLES), longest), IGNORE)
    mask = np.zeros_like(ids)
    for row, example in enumerate(EXAMPLES):
        place = slice(longest - len(example.ids), None) if side == "left" else slice(0, len(example.ids))
        ids[row, place], mask[row, place] = example.ids, 1
        labels[row, place] = np.where(example.supervised, example.ids, IGNORE)
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    loss = model(**{name: torch.from_numpy(value) for name, value in arguments.items()}).loss
    return loss.detach(), gradients(model, loss)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_same(actual, expected, tolerance: float = FP32_RELATIVE) -> None:
    assert relative(actual[0], expected[0]) <= tolerance
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        assert relative(gradient, expected[1][name]) <= tolerance, name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_huggingface(folders, kind, tied, side):
    model = model_of(folders[tied], kind)
    batch = collate(EXAMPLES, pad_id=0, side=side)
    expected = huggingface(model, side)
    assert_same(ours(model, batch), expected)
    shifted = replace(batch, targets=batch.targets.roll(1, dims=1))  # twin: one position off
    with pytest.raises(AssertionError):
        assert_same(ours(model, shifted), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_changes_nothing(folders, kind):
    """Padding side, amount and token, row order, and the split into micro-batches."""
    model = model_of(folders[False], kind)
    expected = ours(model, collate(EXAMPLES, pad_id=0))
    wide = collate([*EXAMPLES, *examples(40)], pad_id=0)
    rows = len(EXAMPLES)
    padded = Batch(wide.input_ids[:rows], wide.targets[:rows], None, int((wide.targets[:rows] != IGNORE).sum()), (), ())
    for batches in (
        [collate(EXAMPLES, pad_id=0, side="left")],
        [collate(EXAMPLES, pad_id=321)],
        [collate(EXAMPLES[::-1], pad_id=0)],
        [padded],
        [collate([example], pad_id=0) for example in EXAMPLES],
        [collate(EXAMPLES[:1], pad_id=0), collate(EXAMPLES[1:], pad_id=0, side="left")],
    ):
        assert_same(ours(model, *batches), expected)
    with pytest.raises(AssertionError):  # twin: another data set
        assert_same(ours(model, collate(EXAMPLES[1:], pad_id=0)), expected)


def test_a_mean_of_means_would_not_pass(folders):
    """The twin of the split: dividing each micro-batch by its own weight is the classic accumulation fault."""
    model = model_of(folders[False])
    whole = ours(model, collate(EXAMPLES, pad_id=0))[0]
    means = torch.stack([ours(model, collate([example], pad_id=0))[0] for example in EXAMPLES])
    assert relative(means.mean(), whole) > FP32_RELATIVE


@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_nothing_to_learn_is_zero_with_a_graph(folders, kind, compute):
    model = model_of(folders[False], kind)
    batch = collate(EXAMPLES, pad_id=0)
    empty = replace(batch, targets=torch.full_like(batch.targets, IGNORE), weight=0)
    with torch.autocast("cpu", dtype=compute or torch.bfloat16, enabled=compute is not None):
        loss = sft_loss(model, empty).loss
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in gradients(model, loss).values())
        with torch.no_grad():
            assert sft_loss(model, empty).sums["correct"].item() == 0


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_fp32_under_autocast(folders, kind, compute):
    model = model_of(folders[False], kind)
    batch = collate(EXAMPLES, pad_id=0)
    expected = sft_loss(model, batch).loss
    with torch.autocast("cpu", dtype=compute):
        loss = sft_loss(model, batch).loss
    assert loss.dtype == torch.float32
    assert 0 < relative(loss.detach(), expected.detach()) <= BF16_RELATIVE


def test_accuracy_counts_first_choices_in_evaluation_only(folders):
    model = model_of(folders[False]).eval()
    batch = collate(EXAMPLES, pad_id=0)
    with torch.no_grad():
        best = model(input_ids=batch.input_ids).logits.argmax(-1)
        known = torch.where(batch.targets != IGNORE, best, batch.targets)
        known[0, -1] = IGNORE  # padding stays out
        right = sft_loss(model, replace(batch, targets=known))
        assert right.sums["correct"].item() == batch.weight
        wrong = torch.where(known != IGNORE, (known + 1) % 300, known)
        assert sft_loss(model, replace(batch, targets=wrong)).sums["correct"].item() < batch.weight
    assert not sft_loss(model, batch).sums


def test_the_head_sees_supervised_positions_only(folders):
    model = model_of(folders[False])
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    batch = collate(EXAMPLES, pad_id=0)
    sft_loss(model, batch)
    assert seen == [(1, batch.weight, 32)]
    assert not model.lm_head._forward_pre_hooks
