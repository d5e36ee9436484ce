"""With its adapter off, what is opened computes what the base alone computes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.zoo import ZOO
from surefoot.evaluate.side_by_side import sides
from surefoot.families.bos_zero import BOS_FILE
from surefoot.methods.open_model import open_for_use
from surefoot.models.forward import causal_model

IDS = torch.tensor([[5, 9, 17, 33, 21]])


@pytest.fixture(scope="module", params=["lora", "dora", "head", "scaled"])
def pair(request, tmp_path_factory):
    """A base, and an adapter over it that changes every logit. scaled: it was trained with a BOS factor."""
    root = tmp_path_factory.mktemp("sides")
    base = ZOO["llama3"](root / "base")
    saved = ["lm_head"] if request.param == "head" else None
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], use_dora=request.param == "dora", modules_to_save=saved
    )
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(root / "adapter")
    if request.param == "scaled":
        (root / "adapter" / BOS_FILE).write_text('{"scaling_factor": 0.1}')
    return base, root / "adapter"


@torch.no_grad()
def logits(opened) -> torch.Tensor:
    return causal_model(opened.model)(IDS, attention_mask=torch.ones_like(IDS)).logits


def test_off_is_the_base_bit_for_bit(pair):
    alone, both = open_for_use(str(pair[0])), open_for_use(str(pair[0]), str(pair[1]))
    base, adapter = sides(both)
    assert (base.name, adapter.name) == ("base", "adapter")
    with_adapter = logits(both)
    with base.entered():
        assert torch.equal(logits(both), logits(alone))
    assert torch.equal(logits(both), with_adapter)  # on again
    assert not torch.equal(with_adapter, logits(alone))  # else nothing was shown


def test_one_side_on_request(pair):
    both, alone = open_for_use(str(pair[0]), str(pair[1])), open_for_use(str(pair[0]))
    assert [side.name for side in sides(both, "base")] == ["base"]
    assert [side.name for side in sides(both, "adapter")] == ["adapter"]
    assert [side.name for side in sides(alone)] == [side.name for side in sides(alone, "base")] == ["model"]
    with raises_fault("SF-USE-FLAG", "--only"):
        sides(alone, "adapter")
