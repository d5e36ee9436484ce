"""The BOS scaling in a packed row: every document begins with a scaled token, and the check sees all of them."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.faults import raises_fault
from surefoot.data.batching.batch import Example, collate, pack
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.bos import install_bos_scaling, verify_bos_scaling
from surefoot.models.fast.packing import packed_attention
from surefoot.models.forward import model_inputs

LENGTHS = (12, 7, 9)
# A loss summed over some thirty tokens, by two ways in fp32.
FP32_LOSS = 1e-4
# bf16 keeps 8 bits of each number; the factor is a mean of them.
BF16_FACTOR = 2e-2


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(zoo.llama2(tmp_path / "base"))


def examples():
    draw = np.random.default_rng(0)
    return [Example(draw.integers(6, 60, n), np.ones(n, dtype=bool), row) for row, n in enumerate(LENGTHS)]


@pytest.fixture(params=[0, 40])
def filled(request, monkeypatch):
    """Rows end with that much filling, in fp32, too."""
    monkeypatch.setattr("surefoot.models.forward.round_up_rows", lambda rows, dtype, device: rows + request.param)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("scale", [0.25, 0.0])
def test_every_document_begins_with_a_scaled_token(model, scale):
    plain = sft_loss(model, collate(examples(), 1)).loss
    install_bos_scaling(model, scale)
    padded = sft_loss(model, collate(examples(), 1)).loss
    packed_attention("matmul").install(model)
    row = pack(examples())
    assert abs(sft_loss(model, row).loss - padded) < FP32_LOSS < abs(plain - padded)
    found = verify_bos_scaling(model, row, scale)
    assert found["sequences"] == len(LENGTHS)
    assert found["factor"] == pytest.approx([scale, scale], abs=1e-4)


def test_rows_of_16_bits_end_with_filling(model):
    """As long as products in bf16 want them on a CPU."""
    model = model.bfloat16()
    install_bos_scaling(model, 0.25)
    packed_attention("matmul").install(model)
    row = pack(examples())
    assert model_inputs(model, row)["input_ids"].shape[1] > sum(LENGTHS)
    found = verify_bos_scaling(model, row, 0.25)
    assert found["sequences"] == len(LENGTHS)
    assert found["factor"] == pytest.approx([0.25, 0.25], abs=BF16_FACTOR)


@pytest.mark.usefixtures("filled")
def test_twin_that_scales_the_rows_first_token_alone(model, monkeypatch):
    def first_column(embedded, *_):
        return (torch.arange(embedded.shape[1]) == 0).expand(embedded.shape[:2])

    monkeypatch.setattr("surefoot.models.bos.sequence_starts", first_column)
    install_bos_scaling(model, 0.25)
    packed_attention("matmul").install(model)
    with raises_fault("SF-PLAN-BROKEN", "plan: bos.scale", 0.25, 1):
        verify_bos_scaling(model, pack(examples()), 0.25)
