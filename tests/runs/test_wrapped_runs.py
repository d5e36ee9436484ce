"""Runs on checkpoints that also see, from config to published folder: what is written opens as the checkpoint did."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from helpers.tiers import representatives
from helpers.wrappers import MTP, PREPROCESSOR, wrapper
from surefoot import train
from surefoot.evaluate.capture import capture
from surefoot.runs.export.model import export_model

NAME = "qwen3_5"
WORDS = ("heron", "trout", "sky", "bird")
IDS = torch.arange(3, 43).reshape(2, 20) * 7 % 300
RECORDS = {
    "sft": [{"instruction": f"Say {word}", "input": "", "output": f"{word} and {word}"} for word in WORDS],
    "dpo": [{"instruction": f"Say {word}", "input": "", "chosen": word, "rejected": "no"} for word in WORDS],
    "kto": [{"instruction": f"Say {word}", "output": word, "label": word != "sky"} for word in WORDS],
}
RECORDS["reward"], RECORDS["ppo"] = RECORDS["dpo"], RECORDS["sft"]
LORA = {"kind": "lora", "rank": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return wrapper(NAME, tmp_path_factory.mktemp("base") / NAME)


def trained(folder: Path, base: Path, stage: str = "sft", *, resume: bool = False, **changes) -> Path:
    (folder / "data.json").write_text(json.dumps(RECORDS[stage]))
    config = {
        "stage": stage,
        "model": str(base),
        "data": {"train": str(folder / "data.json")},
        "batch": {"size": 2},
        "optim": {"lr": 1e-2},
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "output": str(folder / "run"),
    }
    train(config | changes, resume=resume)
    return folder / "run"


def opened(folder: Path):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def test_all_weights_are_published_as_a_checkpoint_that_still_sees(base, tmp_path):
    run = trained(tmp_path, base)
    before, after = load_file(base / "model.safetensors"), load_file(run / "model.safetensors")
    assert before.keys() == after.keys()
    same = {key for key in before if torch.equal(before[key], after[key])}
    assert {key for key in before if "visual" in key} | MTP.keys() <= same
    assert "model.language_model.layers.0.mlp.up_proj.weight" not in same
    assert json.loads((run / "preprocessor_config.json").read_text()) == PREPROCESSOR
    assert "AutoModelForImageTextToText" in (run / "README.md").read_text()
    coverage = {row["kind"]: row for row in json.loads((run / "plan.json").read_text())["plan"]["coverage"]}
    sight = [coverage["vision tower"], coverage["projector"]]
    assert sum(row["weights"] for row in sight) == sum(one.numel() for key, one in before.items() if "visual" in key)
    assert all(row["weights"] > 0 == row["reached"] == row["trained"] for row in sight)
    again = (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoint-2")
    trained(tmp_path, base, resume=True)
    assert (run / "model.safetensors").read_bytes() == again  # the heads that nobody loads are the base's there too


def test_an_adapter_is_merged_into_the_checkpoint_and_looked_into(base, tmp_path):
    run = trained(tmp_path, base, adapter=LORA)
    wanted = logits(PeftModel.from_pretrained(opened(base), run).eval())
    merged = export_model(str(run), tmp_path / "merged", merge=True).folder
    found = logits(opened(merged))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert MTP.keys() <= load_file(merged / "model.safetensors").keys()
    assert json.loads((merged / "preprocessor_config.json").read_text()) == PREPROCESSOR
    assert not torch.equal(logits(opened(base)), wanted)  # twin: the adapter does something
    seen = capture(str(base), tmp_path / "seen", adapter=str(run), seq_len=8)
    assert seen.folder == tmp_path / "seen"


@pytest.mark.parametrize("stage", representatives(("dpo", "kto", "reward", "ppo"), "dpo"))
@pytest.mark.parametrize("adapter", representatives((None, "lora"), "lora"))
def test_every_method_trains_the_language_model_alone(base, tmp_path, stage, adapter):
    own = {}
    if stage == "ppo":
        (tmp_path / "judge").mkdir()
        own["ppo"] = {"reward": str(trained(tmp_path / "judge", base, "reward"))}
    run = trained(tmp_path, base, stage, **own, **({"adapter": LORA} if adapter else {}))
    if adapter:
        keys = load_file(run / "adapter_model.safetensors").keys()
        assert all(key.startswith("base_model.model.model.language_model.layers.") for key in keys if "lora" in key)
    else:
        before, after = load_file(base / "model.safetensors"), load_file(run / "model.safetensors")
        assert all(torch.equal(before[key], after[key]) for key in before if "visual" in key)
