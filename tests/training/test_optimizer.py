import pytest
import torch

from surefoot.errors import IntegrityError
from surefoot.training.optimizer import adamw, load_optimizer_tensors
from surefoot.training.step import train_step
from toy import settings, toy_batches, toy_engine, toy_examples, toy_loss

# One fp32 update of numbers near 1 against float64: a few units in the last place.
FP32_ROUNDING = 5e-7


def reference_adamw(start, gradients, lr, betas, eps, decay):
    """Loshchilov & Hutter 2019, algorithm 2, in float64."""
    weight, m, v = start.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        gradient = gradient.double()
        weight = weight * (1 - lr * decay)
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        weight = weight - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return weight


@pytest.mark.parametrize(("shape", "decays"), [((4, 3), True), ((5,), False)])
def test_matches_the_published_algorithm_and_spares_vectors(shape, decays):
    torch.manual_seed(0)
    start = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(5)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = adamw({"w": parameter}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()

    def distance(decay):
        return (parameter.double() - reference_adamw(start, gradients, 0.01, (0.9, 0.95), 1e-8, decay)).abs().max()

    assert distance(0.1 if decays else 0.0) < FP32_ROUNDING
    assert distance(0.0 if decays else 0.1) > FP32_ROUNDING  # twin: the other decay is noticed


def test_state_goes_out_and_in_by_name():
    batches = toy_batches(toy_examples(6), 3)
    first, second = toy_engine(), toy_engine()
    train_step(first, toy_loss, batches, step=1, lr=0.1, scale=None, settings=settings())
    saved = first.gather_state()
    second.model.load_state_dict(first.model.state_dict())
    load_optimizer_tensors(second.optimizer, second.parameters, {k: v.clone() for k, v in saved.items()})
    for engine in (first, second):
        train_step(engine, toy_loss, batches, step=2, lr=0.1, scale=None, settings=settings())
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_state_of_another_model_is_refused():
    engine = toy_engine()
    with pytest.raises(IntegrityError, match="do not train"):
        load_optimizer_tensors(engine.optimizer, engine.parameters, {"lm_head.weight/exp_avg": torch.zeros(1)})
    with pytest.raises(IntegrityError, match="not \\[8, 8\\]"):
        load_optimizer_tensors(engine.optimizer, engine.parameters, {"hidden.weight/exp_avg": torch.zeros(3, 3)})
