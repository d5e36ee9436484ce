"""PPO's losses: by hand, against TRL's formulas written out, and independent of how a step is cut into batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.data.batching.rollouts import Episode, PpoBatch, episode_batches, with_texts
from surefoot.methods.losses.logprobs import chosen_logprobs, entropies, log_distribution, token_entropy
from surefoot.methods.losses.ppo import (
    PpoSettings,
    next_coefficient,
    policy_loss,
    ppo_objective,
    value_loss,
)
from surefoot.methods.losses.sft import supervised_logits
from surefoot.models.value_head import ScoredModel, ValueHead, value_width

# float64: a handful of operations on numbers around 1.
FLOAT64 = 1e-12
# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in this tiny model.
FP32_RELATIVE = 1e-5
PAD = 2


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=FLOAT64)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of a whole tensor."""
    return float((found - wanted).norm() / wanted.norm())


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_policy_loss_worked_out_by_hand():
    # Ratios 1, 1.5, 1.5, 0.5, 0.5 with clip 0.2:
    #   A = 2: -2; A = 1, 1.5 -> -1.2 (clipped); A = -1, 1.5 -> 1.5 (not clipped: the worse one counts);
    #   A = 1, 0.5 -> -0.5 (not clipped); A = -1, 0.5 -> 0.8 (clipped)
    ratios, advantages = double(1.0, 1.5, 1.5, 0.5, 0.5), double(2.0, 1.0, -1.0, 1.0, -1.0)
    old = double(-1.0, -2.0, -3.0, -1.0, -2.0)
    loss, sums = policy_loss(old + ratios.log(), old, advantages, 0.2)
    assert loss.item() == pytest.approx(-2 - 1.2 + 1.5 - 0.5 + 0.8, abs=1e-12)
    assert sums["ratio"].item() == pytest.approx(5.0)
    assert sums["clip_fraction"].item() == 2
    wanted = sum(ratio - 1 - math.log(ratio) for ratio in ratios.tolist())
    assert sums["approx_kl"].item() == pytest.approx(wanted)


def test_a_clipped_token_moves_nothing_and_an_unclipped_one_does():
    now = double(math.log(1.5), math.log(1.5), math.log(1.1)).requires_grad_()
    loss, _ = policy_loss(now, double(0.0, 0.0, 0.0), double(1.0, -1.0, 1.0), 0.2)
    loss.backward()
    assert now.grad is not None
    assert_same(now.grad, double(0.0, 1.5, -1.1))


def test_value_loss_worked_out_by_hand():
    # Old 0, clip 0.2. V = 1, R = 2: near 0.2, worse -> 0.5 * 1.8^2. V = 1, R = 0.1: free is worse -> 0.5 * 0.9^2.
    # V = 0.1, R = 1: nothing clipped -> 0.5 * 0.9^2.
    values = double(1.0, 1.0, 0.1).requires_grad_()
    old, returns = double(0.0, 0.0, 0.0), double(2.0, 0.1, 1.0)
    loss = value_loss(values, old, returns, 0.2)
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 0.9**2 + 0.9**2), abs=1e-12)
    loss.backward()
    assert values.grad is not None
    assert_same(values.grad, double(0.0, 0.9, -0.9))
    free = value_loss(values, old, returns, None)
    assert free.item() == pytest.approx(0.5 * (1.0 + 0.81 + 0.81), abs=1e-12)


def test_entropy_of_known_distributions():
    even = torch.zeros(1, 8, dtype=torch.float64)
    assert token_entropy(log_distribution(even)).item() == pytest.approx(math.log(8))
    sure = torch.tensor([[0.0, -1e9, -1e9]])
    assert token_entropy(log_distribution(sure)).item() == 0.0


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation made anew."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("rows", [0, 1, 32, 100])
def test_an_entropy_that_is_only_logged_is_the_same_and_needs_no_second_table(rows):
    log_p = log_distribution(torch.randn(rows, 11, generator=torch.Generator().manual_seed(0)).requires_grad_())
    with _Largest() as seen:
        found = entropies(log_p)
    with _Largest() as whole:  # the twin
        wanted = token_entropy(log_p)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=FP32_RELATIVE)
    assert (found.requires_grad, wanted.requires_grad) == (False, True)
    assert seen.elements <= max(32 * 11, rows)
    assert whole.elements == rows * 11


def trl_losses(logits, targets, values, batch: PpoBatch, *, cliprange, cliprange_value):
    """`PPOTrainer.train` of TRL 0.11 to 0.24, one token after the other, summed: the caller divides."""
    policy = value = 0.0
    for place, token in enumerate(targets.tolist()):
        row = logits[place].double()
        new = float(row[token] - row.logsumexp(0))
        ratio = math.exp(new - float(batch.old_logprobs[place]))
        advantage = float(batch.advantages[place])
        policy += max(-advantage * ratio, -advantage * min(max(ratio, 1 - cliprange), 1 + cliprange))
        old, wanted, now = (float(x[place]) for x in (batch.old_values, batch.returns, values))
        clipped = min(max(now, old - cliprange_value), old + cliprange_value)
        value += 0.5 * max((now - wanted) ** 2, (clipped - wanted) ** 2)
    return policy, value


class Together(nn.Module):
    """A policy and a critic with nothing in common."""

    def __init__(self, policy: nn.Module, critic: ScoredModel):
        super().__init__()
        self.policy = policy
        self.critic = critic


def actor(model: Together, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return supervised_logits(model.policy, batch)


def critic(model: Together, batch: Batch) -> torch.Tensor:
    return model.critic.values(batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Together:
    folder = tiny_llama(tmp_path_factory.mktemp("ppo") / "model")
    policy, backbone = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa") for _ in range(2))
    head = ValueHead(value_width(backbone))
    nn.init.normal_(head.summary.weight, generator=torch.Generator().manual_seed(3))
    return Together(policy, ScoredModel(backbone, head))


def episodes() -> list[Episode]:
    """Prompts and answers of many lengths, an answer of one token among them; ratios on both sides of the clip."""
    draw = np.random.default_rng(0)
    found = []
    for number, (prompt, response) in enumerate([(5, 9), (3, 1), (12, 4), (7, 16), (2, 6)]):
        ids = [int(x) for x in draw.integers(3, 300, prompt + response)]

        def numbers(scale: float, shift: float = 0.0, count: int = response) -> torch.Tensor:
            return torch.from_numpy(draw.normal(shift, scale, count)).float()

        found.append(
            Episode(
                number,
                tuple(ids[:prompt]),
                tuple(ids[prompt:]),
                number,
                logprobs=numbers(0.3, -5.8),
                values=numbers(0.5),
                advantages=numbers(1.0),
                returns=numbers(1.0),
            )
        )
    return found


SETTINGS = PpoSettings(ratio_clip=0.2, value_clip=0.2)
LOSS = ppo_objective(SETTINGS, actor, critic)


def test_same_as_trl_written_out(model):
    (batch,) = episode_batches(episodes(), 5, PAD)
    with torch.no_grad():
        found = LOSS(model, batch)
        logits, targets = actor(model, batch.rows)
        places = batch.rows.targets != -100
        policy, value = trl_losses(
            logits, targets, critic(model, batch.rows)[places], batch, cliprange=0.2, cliprange_value=0.2
        )
    assert found.sums["policy_loss"].item() == pytest.approx(policy, rel=1e-5)
    assert found.sums["value_loss"].item() == pytest.approx(value, rel=1e-5)
    assert found.loss.item() == pytest.approx(policy + value, rel=1e-5)
    assert 0 < found.sums["clip_fraction"].item() < batch.weight


def test_another_clip_or_shifted_values_are_noticed(model):
    (batch,) = episode_batches(episodes(), 5, PAD)
    with torch.no_grad():
        right = LOSS(model, batch).loss.item()
        wide = ppo_objective(replace(SETTINGS, ratio_clip=0.3), actor, critic)(model, batch).loss.item()

        def late(model: Together, rows: Batch) -> torch.Tensor:
            return critic(model, rows).roll(-1, 1)

        shifted = ppo_objective(SETTINGS, actor, late)(model, batch).loss.item()
    assert wide != pytest.approx(right, rel=1e-4)
    assert shifted != pytest.approx(right, rel=1e-4)


def gradients(model: Together, batches: list[PpoBatch], settings: PpoSettings) -> dict[str, torch.Tensor]:
    model.zero_grad()
    objective = ppo_objective(settings, actor, critic)
    weight = sum(batch.weight for batch in batches)
    for batch in batches:
        (objective(model, batch).loss / weight).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def texts() -> list[Example]:
    draw = np.random.default_rng(1)
    return [Example(draw.integers(3, 300, n), np.arange(n) >= 2, n) for n in (11, 6, 9)]


FULL = PpoSettings(ratio_clip=0.2, value_clip=0.2, entropy=0.01, unsup=0.5, temperature=0.8)


def cut(micro: int, per_text: int) -> list[PpoBatch]:
    found = texts()
    mixed = [collate(found[i : i + per_text], PAD) for i in range(0, len(found), per_text)]
    return with_texts(episode_batches(episodes(), micro, PAD), mixed)


@pytest.mark.parametrize(("micro", "per_text"), [(1, 1), (2, 1), (3, 2)])
def test_the_cut_into_micro_batches_changes_nothing(model, micro, per_text):
    whole, cut_up = gradients(model, cut(5, 3), FULL), gradients(model, cut(micro, per_text), FULL)
    assert whole.keys() == cut_up.keys()
    for name, gradient in whole.items():
        assert distance(cut_up[name], gradient) < FP32_RELATIVE, name


def test_every_batch_has_a_text_and_blank_ones_count_nothing(model):
    """Ranks that share weights must run as many forward passes as each other: 5 batches, 2 of texts."""
    batches = cut(1, 2)
    assert [batch.text is not None and batch.text.weight > 0 for batch in batches] == [True, True, False, False, False]
    assert all(batch.text is not None and batch.text_share == 0 for batch in batches[2:])
    whole = gradients(model, cut(5, 3), FULL)
    assert all(
        distance(gradient, whole[name]) < FP32_RELATIVE for name, gradient in gradients(model, batches, FULL).items()
    )
    counted = [replace(batch, text_share=batches[0].text_share) for batch in batches]  # twin
    found = gradients(model, counted, FULL)
    assert any(distance(found[name], gradient) > FP32_RELATIVE for name, gradient in whole.items())


def test_a_mean_over_each_micro_batch_would_be_noticed(model):
    whole = gradients(model, cut(5, 3), FULL)
    batches = [replace(batch, advantages=batch.advantages / batch.weight) for batch in cut(2, 1)]
    cut_up = gradients(model, batches, FULL)
    assert any(distance(cut_up[name], gradient) > FP32_RELATIVE for name, gradient in whole.items())


def test_texts_are_mixed_in_with_the_weight_of_their_own_mean(model):
    plain, mixed = episode_batches(episodes(), 5, PAD), cut(5, 3)
    objective = ppo_objective(replace(SETTINGS, unsup=2.0), actor, critic)
    with torch.no_grad():
        difference = (objective(model, mixed[0]).loss - objective(model, plain[0]).loss) / mixed[0].weight
        assert mixed[0].text is not None
        logits, targets = actor(model, mixed[0].text)
        wanted = 2.0 * F.cross_entropy(logits, targets)
    assert difference.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_actor_and_critic_get_gradients_of_their_own_losses_alone(model):
    batches = episode_batches(episodes(), 5, PAD)
    both = gradients(model, batches, SETTINGS)
    still = [replace(batch, advantages=torch.zeros_like(batch.advantages)) for batch in batches]
    critic_alone = gradients(model, still, SETTINGS)
    for name, gradient in critic_alone.items():
        if name.startswith("policy."):
            assert not gradient.any()
        else:
            assert distance(gradient, both[name]) < FP32_RELATIVE


def test_the_order_of_the_numbers_is_that_of_the_supervised_places():
    (batch,) = episode_batches(episodes(), 5, PAD)
    one_by_one = {one.number: one for one in episodes()}
    start = 0
    for row, number in enumerate(batch.examples):
        one = one_by_one[number]
        supervised = batch.rows.targets[row][batch.rows.targets[row] != -100]
        assert supervised.tolist() == list(one.response)
        assert batch.old_logprobs[start : start + len(one.response)].tolist() == one.logprobs.tolist()
        start += len(one.response)
    assert start == batch.weight == len(batch.returns)


def test_temperature_is_that_of_the_policy_which_draws():
    logits, targets = torch.randn(4, 9, dtype=torch.float64), torch.tensor([0, 3, 8, 1])
    found = chosen_logprobs(log_distribution(logits, 0.5), targets)
    wanted = torch.log_softmax(logits * 2, dim=-1)[range(4), targets]
    assert_same(found, wanted)


def next_of(now=0.2, kl=6.0, target: float | None = 6.0, answers=256) -> float:
    return next_coefficient(now, kl, target=target, horizon=10_000, answers=answers)


def test_without_a_target_it_stays():
    assert next_of(kl=1e9, target=None) == 0.2


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 256 / 10_000),
        (60.0, 1 + 0.2 * 256 / 10_000),  # no more than a fifth per horizon
        (0.0, 1 - 0.2 * 256 / 10_000),
        (-3.0, 1 - 0.2 * 256 / 10_000),
    ],
)
def test_it_rises_above_the_target_and_falls_below_it(kl, factor):
    assert next_of(kl=kl) == pytest.approx(0.2 * factor, rel=1e-12)


def test_it_never_turns_negative():
    assert next_of(kl=0.0, answers=10**6) == 0.0


def test_a_simulated_policy_settles_at_the_target():
    """A policy whose KL is inversely proportional to the coefficient, as if reward and penalty were in balance."""
    coefficient = 1.0
    for _ in range(2_000):
        coefficient = next_of(coefficient, kl=0.6 / coefficient)
    assert 0.6 / coefficient == pytest.approx(6.0, rel=0.01)
