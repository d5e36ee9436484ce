"""What multiplies in fp32 in a 16-bit run, where TF32 may round it: nothing that has more digits to lose."""

import json
from contextlib import contextmanager

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from helpers.architectures import TINY, build
from helpers.doctor_runs import clean_base, clean_run
from helpers.tiers import representatives
from surefoot.models.product_flops import ProductFlops
from surefoot.runs.trial import ready

STEPS = 2
DORA = {"adapter": {"kind": "dora", "rank": 4}}
NORMS, HEAD = "self_attn.q_proj", "v_head.summary"  # the first product of a layer asks for the norms of its rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("left")
    rows = [
        {"prompt": f"Say {word}.", "chosen": word, "rejected": "no " * k}
        for word in ("one", "two", "heron")
        for k in (1, 2, 3, 4)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    return folder, clean_base(folder / "base")


def left(place, **changes):
    """Names of the modules, and the share of all arithmetic."""
    folder, base = place
    changes = {"precision": "bf16"} | changes
    if "stage" in changes:
        changes["data"] = {"train": str(folder / "pairs.json"), "max_length": 64}
    with ready(clean_run(folder, base, **changes), STEPS) as one:
        with ProductFlops() as seen:
            for number in range(1, STEPS + 1):
                one.step(number, one.batches(number))
        return [name for name, _ in seen.modules("fp32")], seen.share("fp32")


# What is changed of a run, and which products are left in fp32.
LEFT = {
    "lora": ({}, []),
    "dora": (DORA, [NORMS]),
    "dora, fp32 base": (DORA | {"precision": {"compute": "bf16", "base": "fp32"}}, [NORMS]),
    "dora, plain": (DORA | {"kernels": {"adapter": "plain"}}, []),
    "full": ({"adapter": None}, []),
    "muon": ({"adapter": None, "optim": {"name": "muon", "lr": 1e-3}}, []),
    "reward": ({"stage": "reward"}, [HEAD]),
    "dpo": ({"stage": "dpo"}, []),
}


@pytest.mark.parametrize("name", representatives(LEFT, "dora", "muon", "reward"))
def test_norms_and_value_heads_are_all_that_is_left(place, name):
    changes, places = LEFT[name]
    found, share = left(place, **changes)
    assert len(found) == len(places)
    assert all(name.endswith(end) for name, end in zip(found, places, strict=True))
    assert share < 0.002


@contextmanager
def counted(model):
    with torch.autocast("cpu", torch.bfloat16), ProductFlops() as seen:
        yield seen
        model(input_ids=torch.arange(1, 9)[None], use_cache=False)


@pytest.mark.parametrize("family", TINY)
def test_no_family_turns_its_heads_by_a_product(family):
    """Positions above 2,048 would be rounded. Transformers before 5.23 had such products."""
    model = build(TINY[family], device="cpu").eval()
    with counted(model) as seen:
        pass
    assert seen.modules("fp32") == []


def test_twin_positions_in_a_product_are_seen(monkeypatch):
    def as_it_was(self, x, position_ids):
        with torch.autocast("cpu", enabled=False):
            angles = (self.inv_freq[None, :, None].float() @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", as_it_was)
    with counted(build(TINY["llama"], device="cpu").eval()) as seen:
        pass
    assert [name for name, _ in seen.modules("fp32")] == ["model.rotary_emb"]
