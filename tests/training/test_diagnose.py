import json
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from surefoot.models.fast.chunked_head import chunked_head, loss_path
from surefoot.objectives.sft import sft_loss
from surefoot.training import diagnose
from surefoot.training.diagnose import Origin, TensorFacts, _watch, find_origin, place_of_error
from surefoot.training.engine import SingleEngine
from surefoot.training.optimizer import adamw, trainable_parameters
from surefoot.training.step import accumulate_gradients, draw
from toy import settings, toy_batches, toy_engine, toy_examples, toy_loss


def origin_of(engine, batches, objective=toy_loss):
    return find_origin(engine, objective, batches, step=1, scale=None, settings=settings()).origin


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


def overflowing_head(tmp_path):
    """An engine whose output head, computed a few positions at a time, overflows in its last word alone."""
    folder = zoo.llama3(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # not the embedding's
    with torch.no_grad():
        model.lm_head.weight[-1] = float("inf")
    loss_path(4).install(model)
    parameters = trainable_parameters(model)
    optimizer = adamw(parameters, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    return SingleEngine(model, parameters, optimizer)


def test_names_a_head_that_overflows_in_the_chunked_loss(tmp_path):
    origin = origin_of(overflowing_head(tmp_path), toy_batches(toy_examples(4), 4), sft_loss)
    assert (origin.module, origin.phase) == ("lm_head", "forward")
    assert origin.tensor.shape[0] == 4  # the piece in which it was


def test_twin_unwatched_the_loss_would_be_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose, "watched_logits", lambda *given: nullcontext())
    origin = origin_of(overflowing_head(tmp_path), toy_batches(toy_examples(4), 4), sft_loss)
    assert origin.phase == "loss"


def test_watching_the_chunked_loss_leaves_nothing_behind(tmp_path):
    engine = overflowing_head(tmp_path)
    assert chunked_head(engine.model).see is None
    origin_of(engine, toy_batches(toy_examples(4), 4), sft_loss)
    assert chunked_head(engine.model).see is None


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Branches(torch.nn.Module):
    """Three modules that read one tensor; the gradient of the second is spoilt inside of it."""

    def __init__(self, spoil):
        super().__init__()
        self.below = torch.nn.Linear(4, 4)
        self.first, self.second, self.third = (Branch(number == 1 and spoil) for number in range(3))

    def forward(self, x):
        x = torch.tanh(self.below(x))
        return self.first(x) + self.second(rows=x) + self.third(x)


class Branch(torch.nn.Module):
    def __init__(self, spoil):
        super().__init__()
        self.weight, self.spoil = torch.nn.Parameter(torch.ones(4)), spoil

    def forward(self, rows):
        return (Spoilt.apply(rows) if self.spoil else rows) * self.weight


def seen_in(model):
    torch.manual_seed(0)
    with _watch(model) as seen:
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    return [(module, phase) for module, phase, _ in seen]


def test_names_the_module_that_spoils_a_gradient_among_those_that_share_an_input():
    assert seen_in(Branches(spoil=True)) == [("second", "backward")]


def test_twin_branches_without_a_fault():
    assert seen_in(Branches(spoil=False)) == []


def test_watching_changes_no_bit_of_loss_and_gradients():
    engine, batches = toy_engine(dropout=0.3), toy_batches(toy_examples(6), 2)
    finding = find_origin(engine, toy_loss, batches, step=1, scale=None, settings=settings())
    assert finding.origin is None
    for number, batch in enumerate(batches):
        draw(engine, settings(), 1, number)
        loss = toy_loss(engine.model, batch).loss
        assert float(loss.detach()) == finding.losses[number]


def test_facts_of_a_tensor():
    tensor = torch.tensor([[1.0, float("nan")], [float("-inf"), -3.5]], dtype=torch.bfloat16)
    facts = TensorFacts.of(tensor)
    assert (facts.shape, facts.dtype, facts.nan, facts.inf, facts.largest) == ((2, 2), "bfloat16", 1, 1, 3.5)
    assert str(facts) == "1 NaN and 1 infinite of 2x2 bfloat16, the largest finite one 3.5"
    other = TensorFacts.of(torch.tensor([[1.0, float("nan")], [float("-inf"), -3.516]], dtype=torch.bfloat16))
    assert facts.sha256 != other.sha256
    origin = Origin("hidden", "backward", (3, "a.json:4"), 1, facts)
    assert Origin.from_json(json.loads(json.dumps(origin.to_json()))) == origin


def test_the_module_in_which_an_exception_was_raised():
    engine = toy_engine()

    engine.model.hidden.forward = lambda x: (_ for _ in ()).throw(ValueError("no"))
    with pytest.raises(ValueError) as raised:
        engine.model(torch.zeros(1, 2, dtype=torch.long))
    assert place_of_error(raised.value, engine.model) == "hidden"
    assert place_of_error(ValueError("elsewhere"), engine.model) == ""
