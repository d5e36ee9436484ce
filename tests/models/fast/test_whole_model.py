"""The paths that need a model's whole structure, in every family that there is a tiny model of."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.tiers import representatives
from helpers.wrappers import WRAPPERS, wrapper
from helpers.zoo_modern import MODERN
from models.fast.test_last_block import BATCH, difference, measured
from surefoot.models.fast.chunked_head import chunked_head, loss_path
from surefoot.models.fast.last_block import last_block_path

FP32 = 2e-5  # 24 bits over a few hundred operations
# No attention alone in the last layer; in Gemma 3n's, states of several places are mixed around it.
ALL_ROWS = {"bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "gemma3n_text", "wrapped gemma3n"}
NAMES = [*MODERN, *(f"wrapped {name}" for name in WRAPPERS)]
CAPPED = {"recurrent_gemma": {"logits_soft_cap": 2.0}, "wrapped gemma4": {"final_logit_softcapping": 2.0}}


def model_of(name, folder):
    more = CAPPED.get(name, {})
    if name in MODERN:
        return AutoModelForCausalLM.from_pretrained(MODERN[name](folder, **more)).eval()
    return AutoModelForImageTextToText.from_pretrained(wrapper(name.split()[1], folder, **more)).eval()


@pytest.mark.parametrize("name", representatives(NAMES, "recurrent_gemma", "mamba2", "wrapped gemma4"))
def test_gives_the_same(tmp_path, name):
    model = model_of(name, tmp_path)
    plain = measured(model, BATCH)
    assert bool(last_block_path().obstacle(model)) == (name in ALL_ROWS)
    for path in [loss_path(5), *([] if name in ALL_ROWS else [last_block_path()])]:
        assert not path.obstacle(model)
        undo = path.install(model)
        assert difference(measured(model, BATCH), plain) <= FP32
        if name in CAPPED and path.name == "loss":
            assert chunked_head(model).cap == 2
        undo()
