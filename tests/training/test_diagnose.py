import json
import re
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.faults import gives
from helpers.toy_model import settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.fast.chunked_head import chunked_head, loss_path
from surefoot.training import diagnose
from surefoot.training.diagnose import Origin, TensorFacts, _watch, find_origin, largest_finite, place_of_error
from surefoot.training.engine import SingleEngine
from surefoot.training.optimizer import adamw, trainable_parameters
from surefoot.training.step import accumulate_gradients, draw_number, seed_micro_batch


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
    monkeypatch.setattr("surefoot.training.diagnose.seed_micro_batch", lambda *draws: torch.manual_seed(0))
    assert origin_of(engine, batches) is None  # twin: with other draws it is missed


def test_says_nothing_when_all_is_finite_and_leaves_no_gradient_or_hook():
    engine = toy_engine()
    assert origin_of(engine, toy_batches(toy_examples(4), 2)) is None
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.model.modules())


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


def test_names_a_head_that_overflows_in_the_chunked_loss(tmp_path, monkeypatch):
    engine, batches = overflowing_head(tmp_path), toy_batches(toy_examples(4), 4)
    origin = origin_of(engine, batches, sft_loss)
    assert (origin.module, origin.phase) == ("lm_head", "forward")
    assert origin.tensor.shape[0] == 4  # the piece in which it was
    assert chunked_head(engine.model).see is None  # watching leaves nothing behind
    monkeypatch.setattr(diagnose, "watched_logits", lambda *given: nullcontext())
    assert origin_of(engine, batches, sft_loss).phase == "loss"  # twin: unwatched, the loss would be blamed


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
    return [(one.module, one.phase) for one in seen]


def test_names_the_module_that_spoils_a_gradient_among_those_that_share_an_input():
    assert seen_in(Branches(spoil=True)) == [("second", "backward")]
    assert seen_in(Branches(spoil=False)) == []  # twin


class Attending(torch.nn.Module):
    """Scores of queries and keys, spoilt on the way there or back between its modules where `act` does so."""

    def __init__(self, act):
        super().__init__()
        self.query, self.out, self.act = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), act

    def forward(self, x, mask=None):
        return self.out(self.act(self.query(x)))


class Layer(torch.nn.Module):
    """after: what it does with the output of attention."""

    def __init__(self, act, after=lambda x: x):
        super().__init__()
        self.attention, self.after = Attending(act), after

    def forward(self, x, mask=None):
        return x + self.after(self.attention(x, mask=mask))


class Layers(torch.nn.Module):
    def __init__(self, act, after=lambda x: x, again=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(torch.tanh), Layer(act, after)])
        self.again = again

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask)
        return x


def sightings(model, mask=None):
    torch.manual_seed(0)
    with _watch(model) as seen:
        model(torch.randn(3, 4, requires_grad=True), mask).sum().backward()
    return [(one.module, one.phase, one.made_in) for one in seen]


def forward_spoilt(x):
    return x * float("inf") * 0.0


@pytest.mark.parametrize("again", [False, True])
def test_what_a_module_computes_between_those_inside_of_it_is_its_own(again, monkeypatch):
    """Not of the one in front of which it is seen first, whose input it is."""
    found = sightings(Layers(forward_spoilt, again=again))
    assert found[0] == ("layers.1.attention.out", "input", "layers.1.attention")
    assert sightings(Layers(torch.tanh, again=again)) == []  # twin
    monkeypatch.setattr(diagnose, "_is_spoilt", lambda tensor: False)  # twin: outputs alone blame the next module
    blamed = ("layers.1.attention.out", "forward", "layers.1.attention.out")
    assert sightings(Layers(forward_spoilt, again=again))[0] == blamed


def test_an_input_of_several_modules_is_told_where_it_is_seen_first():
    model = Layers(torch.tanh, forward_spoilt)
    model.layers.append(Layer(torch.tanh))
    assert sightings(model)[0] == ("layers.1", "forward", "layers.1")  # the output of the layer that made it


@pytest.mark.parametrize("again", [False, True])
def test_what_is_spoilt_on_the_way_back_between_modules_is_told_by_the_one_that_was_under_way(again):
    found = sightings(Layers(Spoilt.apply, again=again))
    assert found == [("layers.1.attention.query", "gradient", "layers.1.attention")]
    # attention returns what its last module does: the layer around it has spoilt that
    found = sightings(Layers(torch.tanh, Spoilt.apply, again=again))
    assert found == [("layers.1.attention.out", "gradient", "layers.1")]


def test_a_mask_of_minus_infinity_is_no_fault():
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    assert sightings(Layers(torch.tanh), mask) == []
    assert sightings(Layers(forward_spoilt), mask)[0][0] == "layers.1.attention.out"
    # twin: one that is spoilt itself, and matters
    model = Layers(torch.tanh)
    model.layers[0].attention.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    assert sightings(model, mask * float("nan"))[0] == ("layers.0", "input", "")


def test_an_input_of_which_nothing_comes_is_no_fault():
    class Reads(torch.nn.Module):
        def forward(self, x, mask):
            return torch.where(mask.isnan(), x, 0.0)

    class Reading(Layers):
        def __init__(self, act):
            super().__init__(act)
            self.reads = Reads()

        def forward(self, x, mask=None):
            return super().forward(self.reads(x, mask))

    nothing = torch.full((3, 4), float("nan"))
    assert sightings(Reading(torch.tanh), nothing) == []
    assert sightings(Reading(forward_spoilt), nothing)[0][:2] == ("layers.1.attention.out", "input")


def test_the_words_name_who_made_it():
    origin = Origin("a.b.out", "input", (1,), made_in="a.b")
    assert [gives(origin.what, one) for one in ("input", "a.b.out", "a.b")] == [True] * 3
    assert gives(Origin("a.b", "input", (1,), made_in="").what, "model")
    back = Origin("a.b.out", "gradient", (1,), made_in="a.b")
    assert [gives(back.what, one) for one in ("gradient", "a.b.out", "a.b")] == [True] * 3
    old = {name: value for name, value in back.to_json().items() if name != "made_in"}
    assert [gives(Origin.from_json(old).what, one) for one in ("gradient", "a.b.out", "a.b")] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_finite_magnitude(dtype):
    assert largest_finite(torch.tensor([1.0, -3.0, 2.0], dtype=dtype)) == 3.0
    assert largest_finite(torch.tensor([1.0, -3.0, float("nan"), float("inf")], dtype=dtype)) == 3.0
    assert largest_finite(torch.tensor([float("-inf")], dtype=dtype)) is None
    assert largest_finite(torch.zeros(0, dtype=dtype)) is None


def test_watching_changes_no_bit_of_loss_and_gradients():
    engine, batches = toy_engine(dropout=0.3), toy_batches(toy_examples(6), 2)
    finding = find_origin(engine, toy_loss, batches, step=1, scale=None, settings=settings())
    assert finding.origin is None
    for number, batch in enumerate(batches):
        seed_micro_batch(settings().seed, 1, draw_number(engine, number))
        loss = toy_loss(engine.model, batch).loss
        assert float(loss.detach()) == finding.losses[number]


def test_facts_of_a_tensor():
    tensor = torch.tensor([[1.0, float("nan")], [float("-inf"), -3.5]], dtype=torch.bfloat16)
    facts = TensorFacts.of(tensor)
    assert (facts.shape, facts.dtype, facts.nan, facts.inf, facts.largest) == ((2, 2), "bfloat16", 1, 1, 3.5)
    assert re.findall(r"\d[\w.]*|bfloat16", str(facts)) == ["1", "1", "2x2", "bfloat16", "3.5"]
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
