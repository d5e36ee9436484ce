"""Loss, scores, gradient and metrics of a reward model: TRL's own, recorded by make_trl_reward.py."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from equality.preference_models import PAIRS, write_models
from equality.test_trl_preference import gradient_norm, rows
from surefoot.data.batching.batch import PairBatch
from surefoot.methods.losses.reward import last_scores, pairs_of, reward_objective
from surefoot.models.value_head import ScoredModel, ValueHead, freeze_output_head

# fp32 over two layers of a width of 32 and the difference of two scores.
FP32 = 2e-5
TRL = json.loads((Path(__file__).parent / "trl_reward.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ScoredModel:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    backbone = AutoModelForCausalLM.from_pretrained(folder / "policy")
    freeze_output_head(backbone)
    head = ValueHead(32)
    head.summary.weight.data.copy_(torch.linspace(-0.3, 0.3, 32))
    head.summary.bias.requires_grad_(False)  # transformers' classifier has none, and the centered loss would move it
    return ScoredModel(backbone, head)


def batch(pairs=PAIRS) -> PairBatch:
    common = tuple(len(chosen[0]) for chosen, _ in pairs)
    return PairBatch(rows([pair[0] for pair in pairs] + [pair[1] for pair in pairs]), common, len(pairs))


def assert_as_trl(model, data, case: str, center: float) -> None:
    expected = TRL[case]
    scores = torch.cat(last_scores(pairs_of(model.values(data.rows), data)))
    assert scores.tolist() == pytest.approx(expected["scores"], rel=FP32, abs=FP32)
    out = reward_objective("last", center=center)(model, data)
    loss = out.loss / data.weight
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=FP32)
    means = {name: float(value) / data.weight for name, value in out.sums.items()}
    assert means["reward_accuracy"] == expected["metrics"]["accuracy"]
    assert means["reward_margin"] == pytest.approx(expected["metrics"]["margin"], rel=FP32)
    mean = (means["reward_chosen"] + means["reward_rejected"]) / 2
    assert mean == pytest.approx(expected["metrics"]["mean_reward"], rel=FP32)
    assert gradient_norm(model, loss) == pytest.approx(expected["grad_norm"], rel=FP32)


@pytest.mark.parametrize(("case", "center"), [("plain", 0.0), ("centered", TRL["center"])])
def test_a_batch_of_pairs(model, case, center):
    assert_as_trl(model, batch(), case, center)
    swapped = [(rejected, chosen) for chosen, rejected in PAIRS]  # twin
    with pytest.raises(AssertionError):
        assert_as_trl(model, batch(swapped), case, center)
    with pytest.raises(AssertionError):  # twin: another coefficient
        assert_as_trl(model, batch(), case, center + 0.01)
