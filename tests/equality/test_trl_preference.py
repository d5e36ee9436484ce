"""Loss, gradient and logged rewards of DPO, its relatives and KTO: TRL's own, recorded by make_trl_preference.py."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from equality.preference_models import JUDGED, PAIRS, Answer, write_models
from surefoot.data.batching.batch import Batch, Example, JudgedBatch, PairBatch, collate
from surefoot.methods.losses.kto import Weights, kto_loss
from surefoot.methods.losses.logprobs import answer_logprobs
from surefoot.methods.losses.preference import LOSSES, Constants, Pairs, preference_loss

# fp32 over sums of some tens of tokens, each with its own softmax over 330 words, and their differences.
FP32 = 2e-5
TRL = json.loads((Path(__file__).parent / "trl_preference.json").read_text())
CASES = {
    "sigmoid": ("sigmoid", TRL["pairs"]["sigmoid"], {}),
    "ipo": ("ipo", TRL["pairs"]["ipo"], {}),
    "hinge": ("hinge", TRL["pairs"]["hinge"], {}),
    **{name: (name, TRL["pairs"][name], {}) for name in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard")},
    **{name: (name, TRL["pairs"][name], {}) for name in ("apo_zero", "apo_down", "discopop")},
    **{name: (name, TRL["pairs"][name], {"label_smoothing": 0.2}) for name in ("robust", "exo_pair")},
    "sigmoid and sft": ("sigmoid", TRL["pairs"]["sigmoid and sft"], {"sft": 0.7}),
    "simpo": ("simpo", TRL["simpo"], {"margin": 0.4}),
    "cpo": ("cpo", TRL["cpo"], {"label_smoothing": 0.2, "sft": -1.0}),  # recorded without the cross entropy
    "cpo and sft": ("cpo", TRL["cpo and sft"], {}),
    "orpo": ("orpo", TRL["orpo"], {"sft": -1.0}),  # TRL's cross entropy counts the prompt too: the other term alone
}
NAMES = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "logp_chosen": "logps/chosen",
    "logp_rejected": "logps/rejected",
}
JUDGED_NAMES = {
    "reward_good": "rewards/chosen",
    "reward_bad": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "logp_good": "logps/chosen",
    "logp_bad": "logps/rejected",
    "kl": "kl",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return {name: AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("policy", "reference")}


def rows(answers: list[Answer]) -> Batch:
    examples = [
        Example(np.array([*prompt, *answer]), np.arange(len(prompt) + len(answer)) >= len(prompt), number)
        for number, (prompt, answer) in enumerate(answers)
    ]
    return collate(examples, pad_id=0)


@torch.no_grad()
def under(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return answer_logprobs(model, batch).sums


def pair_batch(models, pairs=PAIRS) -> PairBatch:
    batch = rows([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
    tokens = sum(len(chosen[1]) for chosen, _ in pairs)
    common = tuple(len(chosen[0]) for chosen, _ in pairs)
    return PairBatch(batch, common, len(pairs), len(pairs) / tokens, under(models["reference"], batch))


def judged_batch(models) -> JudgedBatch:
    own, others = rows([answer for answer, _, _ in JUDGED]), rows([other for _, other, _ in JUDGED])
    good = torch.tensor([good for _, _, good in JUDGED])
    kl = float((under(models["policy"], others) - under(models["reference"], others)).mean().clamp(min=0))
    shares = {"good_share": len(JUDGED) / int(good.sum()), "bad_share": len(JUDGED) / int((~good).sum())}
    return JudgedBatch(own, good, others, len(JUDGED), kl, under(models["reference"], own), **shares)


def gradient_norm(model: torch.nn.Module, loss: torch.Tensor) -> float:
    model.zero_grad()
    loss.backward()
    return float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))


def assert_as_trl(models, objective, batch, expected, names) -> None:
    out = objective(models["policy"], batch)
    loss = out.loss / batch.weight
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=FP32)
    for ours, theirs in names.items():
        if theirs in expected["metrics"]:
            assert float(out.sums[ours]) / batch.weight == pytest.approx(
                expected["metrics"][theirs], rel=FP32, abs=FP32
            )
    assert gradient_norm(models["policy"], loss) == pytest.approx(expected["grad_norm"], rel=FP32)


@pytest.mark.parametrize("case", CASES)
def test_pairs(models, case):
    name, expected, words = CASES[case]
    constants = Constants(TRL["beta"], words.get("label_smoothing", 0.0), margin=words.get("margin", 0.0))
    objective = preference_loss(name, constants, words.get("sft", 0.0))
    batch = pair_batch(models)
    assert_as_trl(models, objective, batch, expected, NAMES)
    for pair, alone in zip(PAIRS, expected["per_pair"], strict=True):
        assert float(objective(models["policy"], pair_batch(models, [pair])).loss.detach()) == pytest.approx(
            alone, rel=FP32
        )
    swapped = [(rejected, chosen) for chosen, rejected in PAIRS]  # twin: the worse answers preferred
    with pytest.raises(AssertionError):
        assert_as_trl(models, objective, pair_batch(models, swapped), expected, NAMES)


def test_label_smoothing():
    words = TRL["smoothing"]
    chosen, rejected = torch.tensor(words["chosen_ratio"]), torch.tensor(words["rejected_ratio"])
    nothing, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    pairs = Pairs(chosen, rejected, nothing, nothing, one, one)
    found = LOSSES["sigmoid"].loss(pairs, Constants(TRL["beta"], words["label_smoothing"]))
    assert found.tolist() == pytest.approx(words["per_pair"], rel=FP32)
    without = LOSSES["sigmoid"].loss(pairs, Constants(TRL["beta"]))  # twin
    assert without.tolist() != pytest.approx(words["per_pair"], rel=FP32)


def test_judged_answers(models):
    objective = kto_loss(Weights(TRL["beta"], good=1.3, bad=0.6))
    batch = judged_batch(models)
    assert_as_trl(models, objective, batch, TRL["kto"], JUDGED_NAMES)
    assert batch.kl  # else the twin would be no other
    with pytest.raises(AssertionError):
        assert_as_trl(models, objective, replace(batch, kl=0.0), TRL["kto"], JUDGED_NAMES)
    with pytest.raises(AssertionError):
        assert_as_trl(models, kto_loss(Weights(TRL["beta"])), batch, TRL["kto"], JUDGED_NAMES)
