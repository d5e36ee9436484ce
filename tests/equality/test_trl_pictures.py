"""Loss and gradients on records with pictures: those of TRL's SFTTrainer and DPOTrainer, recorded by
make_trl_pictures.py."""

import json
import math
from pathlib import Path

import pytest
import torch

from equality.picture_models import MODELS, prompts, write_models, write_pictures
from helpers.prepared import prepared
from helpers.tiers import representatives
from surefoot.data.batching.batch import IGNORE
from surefoot.data.batching.loader import Layout, example_batches, pair_batches
from surefoot.methods.losses.logprobs import frozen, with_reference
from surefoot.methods.losses.preference import Constants, preference_loss
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.load import load_model, load_tokenizer

# fp32 over sums of some hundred tokens, each with its own softmax; of gradients against the largest of the model.
FP32 = 2e-5
TRL = json.loads((Path(__file__).parent / "trl_pictures.json").read_text())
EACH = representatives(list(MODELS), "qwen2_5_vl")


@pytest.fixture(params=EACH)
def case(request, tmp_path):
    write_pictures(tmp_path / "pictures")
    write_models(tmp_path / request.param, request.param)
    return tmp_path / request.param, TRL[request.param]


def opened(folder: Path) -> torch.nn.Module:
    return load_model(folder, dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu")).train()


def prepare(folder: Path, rows: list[dict], kind: str):
    tokenizer = load_tokenizer(folder / "policy")
    path = folder.parent / "pictures" / f"{kind}.json"
    path.write_text(json.dumps(rows))
    return prepared(path, tokenizer, folder / "cache", kind=kind).train


def answered(asked: list[dict], shown: list[str], better: str, worse: str) -> dict:
    return {"messages": [*asked, {"role": "assistant", "content": better}], "images": shown}


def ranked(asked: list[dict], shown: list[str], better: str, worse: str) -> dict:
    return {"prompt": asked, "images": shown, "chosen": better, "rejected": worse}


def assert_tokens(batch, expected) -> None:
    """In the order of the file. targets: as a model predicts them, TRL's labels: as they are predicted."""
    rows = zip(batch.input_ids, batch.targets, batch.lengths, strict=True)
    found = [(ids[:length].tolist(), [IGNORE, *wanted[: length - 1].tolist()]) for ids, wanted, length in rows]
    assert sorted(found) == sorted(zip(expected["ids"], expected["labels"], strict=True))


def assert_loss(model, loss: torch.Tensor, expected) -> None:
    assert loss.item() == pytest.approx(expected["loss"], rel=FP32)
    loss.backward()
    found = {name: float(one.grad.norm()) for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == expected["gradients"].keys()
    most = FP32 * max(expected["gradients"].values())
    assert all(math.isclose(found[name], theirs, abs_tol=most) for name, theirs in expected["gradients"].items())


def test_sft(case):
    folder, trl = case
    data = prepare(folder, [answered(*one) for one in prompts()], "answers")
    (batch,) = example_batches(data, range(len(data)), Layout(0))
    assert_tokens(batch, trl["sft"])
    model = opened(folder / "policy")
    assert_loss(model, sft_loss(model, batch).loss / batch.weight, trl["sft"])
    model.zero_grad()
    turned = [answered(asked, shown[::-1], *rest) for asked, shown, *rest in prompts()]
    data = prepare(folder, turned, "answers")  # twin: two pictures of one record change places
    (batch,) = example_batches(data, range(len(data)), Layout(0))
    with pytest.raises(AssertionError):
        assert_loss(model, sft_loss(model, batch).loss / batch.weight, trl["sft"])


def test_dpo(case):
    folder, trl = case
    data = prepare(folder, [ranked(*one) for one in prompts()], "pairs")
    (batch,) = pair_batches(data, range(len(data) // 2), Layout(0))
    assert_tokens(batch.rows, trl["dpo"])
    model, reference = opened(folder / "policy"), frozen(opened(folder / "reference").eval())
    objective = with_reference(preference_loss("sigmoid", Constants(TRL["beta"])), reference)
    out = objective(model, batch)
    assert_loss(model, out.loss / batch.weight, trl["dpo"])
    for ours, theirs in (("reward_margin", "rewards/margins"), ("logp_chosen", "logps/chosen")):
        assert float(out.sums[ours]) / batch.weight == pytest.approx(trl["dpo"]["metrics"][theirs], rel=FP32, abs=FP32)
    model.zero_grad()
    swapped = [ranked(asked, shown, worse, better) for asked, shown, better, worse in prompts()]
    (twin,) = pair_batches(prepare(folder, swapped, "pairs"), range(len(data) // 2), Layout(0))
    with pytest.raises(AssertionError):  # the worse answers preferred
        assert_loss(model, objective(model, twin).loss / twin.weight, trl["dpo"])
