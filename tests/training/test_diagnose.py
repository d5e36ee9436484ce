import pytest
import torch

from surefoot.training.diagnose import find_origin
from surefoot.training.step import accumulate_gradients
from toy import settings, toy_batches, toy_engine, toy_examples, toy_loss


def origin_of(engine, batches, objective=toy_loss):
    return find_origin(engine, objective, batches, step=1, scale=None, settings=settings())


@pytest.mark.parametrize(("module", "parameter"), [("hidden", "weight"), ("embed", "weight"), ("head", "weight")])
def test_names_the_first_module_of_the_forward(module, parameter):
    engine = toy_engine()
    with torch.no_grad():
        getattr(getattr(engine.model, module), parameter).fill_(float("inf"))
    origin = origin_of(engine, toy_batches(toy_examples(4), 4))
    assert (origin.module, origin.phase) == (module, "forward")


def test_names_the_module_whose_gradient_overflows():
    engine = toy_engine()

    def hook(module, inputs, output):
        output.register_hook(lambda gradient: gradient * float("inf"))

    engine.model.hidden.register_forward_hook(hook)
    origin = origin_of(engine, toy_batches(toy_examples(4), 4))
    assert origin.phase == "gradient"
    assert origin.module in ("hidden", "embed", "dropout")  # the first module behind the overflow


def test_names_the_examples_of_the_bad_micro_batch():
    engine, examples = toy_engine(), toy_examples(6)
    for example in examples:
        example.ids[example.ids == 3] = 4
    examples[4].ids[0] = 3
    with torch.no_grad():
        engine.model.embed.weight[3] = float("nan")
    origin = origin_of(engine, toy_batches(examples, 2))
    assert (origin.module, origin.examples) == ("embed", (4, 5))


def test_replays_the_draws_of_the_step(monkeypatch):
    """A fault that depends on the dropout mask of the second micro-batch is found again, with that mask."""
    engine, batches = toy_engine(dropout=0.5), toy_batches(toy_examples(6), 2)
    masks = []

    def remember(module, inputs, output):
        masks.append(output.detach() == 0)

    handle = engine.model.dropout.register_forward_hook(remember)
    accumulate_gradients(engine, toy_loss, batches, weight=1, step=1, scale=None, settings=settings())
    engine.discard()
    handle.remove()
    fatal = masks[1]

    def poison(module, inputs, output):
        same = output.shape == fatal.shape and torch.equal(output == 0, fatal)
        return output * float("inf") if same else output

    engine.model.dropout.register_forward_hook(poison)
    origin = origin_of(engine, batches)
    assert (origin.module, origin.examples) == ("dropout", batches[1].examples)
    monkeypatch.setattr("surefoot.training.step.seed_micro_batch", lambda *draws: torch.manual_seed(0))
    assert origin_of(engine, batches) is None  # twin: with other draws it is missed


def test_says_nothing_when_all_is_finite_and_leaves_no_gradient_or_hook():
    engine = toy_engine()
    assert origin_of(engine, toy_batches(toy_examples(4), 2)) is None
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert not any(module._forward_hooks for module in engine.model.modules())
