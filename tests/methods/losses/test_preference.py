"""Losses on pairs: a table by hand in float64, and the same result however a step is split."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_llama
from surefoot.config.methods import AlignmentConfig
from surefoot.data.batching.batch import Example, PairBatch, collate
from surefoot.method_facts.losses import PAIR_LOSSES, LossFacts
from surefoot.methods.losses.logprobs import answer_logprobs
from surefoot.methods.losses.preference import (
    LOSSES,
    Constants,
    PairLoss,
    Pairs,
    check_keys,
    check_references,
    preference_loss,
)
from surefoot.methods.preference import check_config

FLOAT64 = 1e-12  # a handful of float64 operations
FP32 = 2e-5  # fp32 sums over some hundred tokens, in another order

# log p(c), log p(r), log q(c), log q(r), |c|, |r|
ROWS = [
    (-3.0, -7.5, -4.0, -6.0, 3, 9),
    (-12.25, -2.5, -11.0, -4.0, 7, 2),
    (-80.0, -60.0, -75.0, -90.0, 40, 30),
    (-5.0, -5.0, -5.0, -5.0, 5, 5),
]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def by_hand(name: str, row: tuple[float, ...], b: float, e: float, m: float) -> float:
    pc, pr, qc, qr, c, r = row
    d = (pc - qc) - (pr - qr)
    match name:
        case "sigmoid":
            return -(1 - e) * math.log(logistic(b * d)) - e * math.log(logistic(-b * d))
        case "hinge":
            return max(0.0, 1 - b * d)
        case "ipo":
            return ((pc - qc) / c - (pr - qr) / r - 1 / (2 * b)) ** 2
        case "sigmoid_norm":
            return -math.log(logistic(b * ((pc - qc) / c - (pr - qr) / r)))
        case "robust":
            return (-(1 - e) * math.log(logistic(b * d)) + e * math.log(logistic(-b * d))) / (1 - 2 * e)
        case "exo_pair":
            return sum(logistic(x) * math.log(logistic(x) / p) for x, p in ((b * d, 1 - e), (-b * d, e)))
        case "discopop":
            w = logistic(b * d / 0.05)
            return -(1 - w) * math.log(logistic(b * d)) + w * math.exp(-b * d)
        case "nca_pair":
            right, wrong, other = (math.log(logistic(x)) for x in (b * (pc - qc), b * (qc - pc), b * (qr - pr)))
            return -right - wrong / 2 - other / 2
        case "bco_pair":
            return -math.log(logistic(b * (pc - qc))) - math.log(logistic(b * (qr - pr)))
        case "sppo_hard":
            return (pc - qc - 1 / (2 * b)) ** 2 + (pr - qr + 1 / (2 * b)) ** 2
        case "apo_zero":
            return logistic(b * (qc - pc)) + logistic(b * (pr - qr))
        case "apo_down":
            return logistic(b * (pc - qc)) + logistic(-b * d)
        case "cpo":
            return -(1 - e) * math.log(logistic(b * (pc - pr))) - e * math.log(logistic(-b * (pc - pr)))
        case "simpo":
            return -math.log(logistic(b * (pc / c - pr / r) - m))
        case "orpo":
            odds = [math.exp(x) / (1 - math.exp(x)) for x in (pc / c, pr / r)]
            return -b * math.log(logistic(math.log(odds[0] / odds[1])))
    raise AssertionError(name)


@pytest.mark.parametrize("name", LOSSES)
def test_by_hand(name):
    for b, e, m in ((0.1, 0.01 if name == "exo_pair" else 0.0, 0.5), (0.7, 0.2, 0.0)):
        found = LOSSES[name].loss(_in_order(ROWS), Constants(b, e, m))
        expected = [by_hand(name, row, b, e, m) for row in ROWS]
        assert found.tolist() == pytest.approx(expected, rel=FLOAT64)
        turned = [(pr, pc, qr, qc, r, c) for pc, pr, qc, qr, c, r in ROWS]  # twin: the worse answer preferred
        assert LOSSES[name].loss(_in_order(turned), Constants(b, e, m)).tolist() != pytest.approx(expected, rel=1e-3)


def test_cpo_is_the_published_formula_in_float64(model):
    """Xu et al. 2024, as TRL's CPOTrainer writes it: label smoothing, and the mean cross entropy of better answers."""
    constants, batch = Constants(0.3, label_smoothing=0.1), replace(batch_of(PAIRS), reference=None)
    found = preference_loss("cpo", constants)(model, batch)
    exact = _summed_in_float64(model, [one for pair in zip(*PAIRS, strict=True) for one in pair])
    chosen, rejected = exact[: len(PAIRS)], exact[len(PAIRS) :]
    scaled = constants.beta * (chosen - rejected)
    pairs = -0.9 * torch.nn.functional.logsigmoid(scaled) - 0.1 * torch.nn.functional.logsigmoid(-scaled)
    tokens = sum(int(one.supervised.sum()) for one, _ in PAIRS)
    expected = pairs.mean() - chosen.sum() / tokens
    assert float(found.loss.detach()) / len(PAIRS) == pytest.approx(float(expected), rel=FP32)
    margin = float(found.sums["reward_margin"]) / len(PAIRS)
    assert margin == pytest.approx(float(scaled.mean()), rel=FP32, abs=FP32)
    assert margin != 0  # twin of the old failure: held to a reference that it equals, it would be
    without = preference_loss("cpo", Constants(0.3))(model, batch)  # twin: no label smoothing
    assert float(without.loss.detach()) / len(PAIRS) != pytest.approx(float(expected), rel=FP32)


def _summed_in_float64(model, examples) -> torch.Tensor:
    """log p of each example's answer, by transformers in float64."""
    exact, found = copy.deepcopy(model).double(), []
    with torch.no_grad():
        for one in examples:
            ids = torch.tensor(one.ids)[None]
            logp = exact(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            found.append(logp[torch.tensor(one.supervised)[1:]].sum())
    return torch.stack(found)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_whose_facts_and_formulas_differ_about_a_reference_cannot_be_imported(name):
    facts = PAIR_LOSSES[name]
    check_references({name: LOSSES[name]}, PAIR_LOSSES)  # twin
    with pytest.raises(RuntimeError, match=f"reference={not facts.reference} .*'{name}'"):
        check_references(LOSSES, {**PAIR_LOSSES, name: replace(facts, reference=not facts.reference)})


def test_rewards_alone_cannot_compare_with_a_reference_that_the_facts_deny():
    with pytest.raises(RuntimeError, match="'orpo'"):
        check_references({"orpo": replace(LOSSES["orpo"], rewards=LOSSES["sigmoid"].rewards)}, PAIR_LOSSES)


@dataclass(frozen=True)
class Sloping(Constants):
    slope: float = 1.0


def sloping(pairs: Pairs, constants: Sloping) -> torch.Tensor:
    return constants.slope * constants.beta * (pairs.chosen_ratio - pairs.rejected_ratio)


@pytest.mark.parametrize(
    ("facts", "constants", "missing"),
    [
        ({"wide": ("slope",)}, Sloping, ""),
        ({"wide": ("slope",)}, Constants, "'slope'.* not in surefoot.methods.losses.preference.Constants"),
        ({"wide": ()}, Sloping, "'slope'.* not in surefoot.method_facts.losses.PAIR_LOSSES"),
        ({"wide": (), "steep": ("slope",)}, Sloping, "'wide' reads 'slope'"),
        ({"wide": ("slope", "margin")}, Sloping, "'wide' does not read 'margin'"),
    ],
)
def test_a_key_of_a_loss_that_is_missing_somewhere_cannot_be_imported(facts, constants, missing):
    rows = LOSSES | {name: replace(LOSSES["hinge"], loss=sloping) for name in facts}
    known = PAIR_LOSSES | {name: LossFacts(reference=True, keys=keys) for name, keys in facts.items()}
    if not missing:
        check_keys(rows, known, constants)
        return
    with pytest.raises(RuntimeError, match=missing):
        check_keys(rows, known, constants)


@pytest.mark.parametrize(
    ("name", "unread", "wrong"),
    [
        ("flat", ("beta",), ""),
        ("flat", (), "'flat' does not read 'beta'"),
        ("hinge", ("beta",), "'hinge' reads 'beta'"),
    ],
)
def test_a_loss_says_that_it_does_not_read_beta(name, unread, wrong):
    flat = PairLoss(lambda pairs, _: pairs.rejected - pairs.chosen, lambda pairs, _: (pairs.chosen, pairs.rejected))
    rows, known = LOSSES | {"flat": flat}, PAIR_LOSSES | {"flat": LossFacts(reference=False, unread=("beta",))}
    known |= {name: replace(known[name], unread=unread)}
    if not wrong:
        check_keys(rows, known, Constants)
        return
    with pytest.raises(RuntimeError, match=wrong):
        check_keys(rows, known, Constants)


def test_a_constant_that_the_config_lacks_cannot_be_imported():
    class Wide(AlignmentConfig):
        slope: float = 1.0

    check_config(Sloping, Wide)  # twin
    with pytest.raises(RuntimeError, match=r"'slope'.* not in surefoot\.config\.methods\.AlignmentConfig"):
        check_config(Sloping, AlignmentConfig)


def _in_order(rows) -> Pairs:
    return Pairs(*torch.tensor(rows, dtype=torch.float64).T)


def test_odds_of_an_answer_that_is_certain_are_finite():
    one = torch.ones(2)
    pairs = Pairs(torch.tensor([0.0, -1e-9]), torch.tensor([-4.0, 0.0]), 0 * one, 0 * one, one, one)
    pairs.chosen.requires_grad_()
    loss = LOSSES["orpo"].loss(pairs, Constants(0.1)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert pairs.chosen.grad is not None
    assert torch.isfinite(pairs.chosen.grad).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path_factory.mktemp("pairs") / "llama")).eval()


def pairs_of(count: int) -> list[tuple[Example, Example]]:
    draw = np.random.default_rng(1)
    found: list[tuple[Example, Example]] = []
    for number in range(count):
        prompt = draw.integers(1, 300, draw.integers(2, 9))
        answers = [draw.integers(1, 300, draw.integers(2, 15)) for _ in range(2)]
        chosen, rejected = (
            Example(np.concatenate([prompt, one]), np.arange(len(prompt) + len(one)) >= len(prompt), number)
            for one in answers
        )
        found.append((chosen, rejected))
    return found


PAIRS = pairs_of(6)
_near = torch.Generator().manual_seed(0)
REFERENCE = {pair[0].number: tuple((torch.randn(2, generator=_near) - 40).tolist()) for pair in PAIRS}


def batch_of(pairs, whole=PAIRS) -> PairBatch:
    """whole: the pairs of the step."""
    tokens = sum(int(chosen.supervised.sum()) for chosen, _ in whole)
    rows = collate([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs], pad_id=0)
    known = [REFERENCE[chosen.number] for chosen, _ in pairs]
    reference = torch.tensor([one[0] for one in known] + [one[1] for one in known])
    row_share = len(whole) / sum(len(chosen.ids) - 1 for chosen, _ in whole)
    return PairBatch(rows, (2,) * len(pairs), len(pairs), len(whole) / tokens, reference, row_share)


def step(model, objective, batches) -> dict[str, float]:
    """What the training step makes of micro-batches, with the norm of the gradient."""
    weight = sum(batch.weight for batch in batches)
    model.zero_grad()
    found: dict[str, float] = {}
    for batch in batches:
        out = objective(model, batch)
        (out.loss / weight).backward()
        for name, value in {"loss": out.loss.detach(), **out.sums}.items():
            found[name] = found.get(name, 0.0) + float(value) / weight
    found["norm"] = float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]))
    return found


@pytest.mark.parametrize("sft", [0.0, 8.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_split_changes_nothing(model, name, sft):
    smoothing = 0.1 if name == "exo_pair" else 0.0  # of which it takes the logarithm
    objective = preference_loss(name, Constants(0.2, smoothing, margin=0.3), sft)
    whole = step(model, objective, [batch_of(PAIRS)])
    split = step(model, objective, [batch_of(PAIRS[:1]), batch_of(PAIRS[1:4]), batch_of(PAIRS[4:])])
    assert split == pytest.approx(whole, rel=FP32, abs=FP32)
    if PAIR_LOSSES[name].sft + sft:  # twin: a mean over each micro-batch's own tokens
        parts = [PAIRS[:1], PAIRS[1:4], PAIRS[4:]]
        wrong = step(model, objective, [batch_of(part, part) for part in parts])
        assert wrong["norm"] != pytest.approx(whole["norm"], rel=10 * FP32)


def test_the_sft_term_is_the_mean_over_the_better_answers(model):
    plain, more = (preference_loss("sigmoid", Constants(0.2), sft) for sft in (0.0, 1.0))
    batch = batch_of(PAIRS)
    with torch.no_grad():
        term = (float(more(model, batch).loss) - float(plain(model, batch).loss)) / batch.weight
        nll = 0.0
        for chosen, _ in PAIRS:
            logits = model(torch.tensor(chosen.ids)[None]).logits[0, :-1].double()
            words = torch.tensor(chosen.ids[1:])
            each = torch.nn.functional.cross_entropy(logits, words, reduction="none")
            nll += float(each[torch.tensor(chosen.supervised[1:])].sum())
    tokens = sum(int(chosen.supervised.sum()) for chosen, _ in PAIRS)
    assert term == pytest.approx(nll / tokens, rel=FP32)


def test_with_prompts_it_is_the_models_own_loss_on_the_better_rows(model):
    """As TRL's ORPO has it; tests/interop/takeover/test_trl.py compares with TRL's trainer."""
    sizes = [len(chosen.ids) - 1 for chosen, _ in PAIRS]
    with torch.no_grad():
        rows = [torch.tensor(chosen.ids)[None] for chosen, _ in PAIRS]
        entropy = sum(float(model(row, labels=row).loss) * size for row, size in zip(rows, sizes, strict=True))
    odds = step(model, preference_loss("orpo", Constants(0.2), -1.0), [batch_of(PAIRS)])
    objective = preference_loss("orpo", Constants(0.2), prompts=True)
    whole = step(model, objective, [batch_of(PAIRS)])
    assert whole["loss"] - odds["loss"] == pytest.approx(entropy / sum(sizes), rel=FP32)
    assert {name: whole[name] for name in odds if name not in ("loss", "norm")} == pytest.approx(
        {name: value for name, value in odds.items() if name not in ("loss", "norm")}, rel=FP32
    )
    assert step(model, objective, [batch_of(PAIRS[:1]), batch_of(PAIRS[1:])]) == pytest.approx(whole, rel=FP32)
    answers = step(model, preference_loss("orpo", Constants(0.2)), [batch_of(PAIRS)])  # twin: without the prompts
    assert answers["loss"] != pytest.approx(whole["loss"], rel=10 * FP32)


def test_policy_equal_to_reference(model):
    """Before step 1: ln 2, no margin, and a tie in every pair, which is neither right nor wrong."""
    objective = preference_loss("sigmoid", Constants(0.1))
    batch = batch_of(PAIRS)
    with torch.no_grad():
        own = objective(model, batch)
        same = objective(model, replace(batch, reference=answer_logprobs(model, batch.rows).sums))
    assert float(same.loss) / 6 == pytest.approx(math.log(2), rel=FP32)
    assert float(same.sums["reward_margin"]) == 0
    assert float(same.sums["reward_accuracy"]) / 6 == 0.5
    assert float(own.loss) / 6 != pytest.approx(math.log(2), rel=1e-3)  # twin: another reference


def test_a_reference_that_is_missing_is_an_error(model):
    batch = replace(batch_of(PAIRS), reference=None)
    with pytest.raises(ValueError, match="reference"):
        preference_loss("sigmoid", Constants(0.1))(model, batch)
    with torch.no_grad():
        assert torch.isfinite(preference_loss("simpo", Constants(0.1))(model, batch).loss)
