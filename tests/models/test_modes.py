"""model.dropout sets what the modules do, and leaves config.json as it was."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from surefoot.models.modes import set_dropout

IDS = torch.tensor([[5, 9, 12, 40, 33]])


def drawn(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits under two draws of masks."""
    model.train()
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(model(IDS).logits)
    return found[0], found[1]


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_without_dropout_no_draw_matters(tmp_path, family):
    folder = zoo.ZOO[family](tmp_path)
    before = (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    first, second = drawn(model)
    assert not torch.equal(first, second)  # the twin: as its config says, masks are drawn
    set_dropout(model, 0.0)
    first, second = drawn(model)
    assert torch.equal(first, second)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()).get("dropout") == json.loads(before).get(
        "dropout"
    )


def test_a_share_reaches_models_that_drop_out_in_functions(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo.opt(tmp_path, dropout=0.0))
    first, second = drawn(model)
    assert torch.equal(first, second)
    set_dropout(model, 0.5)
    first, second = drawn(model)
    assert not torch.equal(first, second)
