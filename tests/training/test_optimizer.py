"""Optimizers against the libraries' own and the published algorithms; schedules against tables and transformers."""

import math
from dataclasses import replace

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.optimization import Adafactor

from surefoot.training.engine.base import set_rates
from surefoot.training.optimizer import (
    MUON_MOMENTUM,
    CombinedOptimizer,
    OptimizerSettings,
    Schedule,
    adamw,
    make_optimizer,
    make_optimizers,
)

# One fp32 update of numbers near 1 against float64: a few units in the last place.
FP32_ROUNDING = 5e-7
NAMES = ("adamw", "adamw_8bit", "adafactor", "rmsprop", "sgd", "muon")
SHAPES = {"embed": (20, 64), "layer.weight": (64, 80), "layer.bias": (64,), "head": (20, 64)}
DECODER = {"layer.weight"}
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
STEPS = 5


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
def test_adamw_is_the_published_algorithm_and_spares_vectors(shape, decays):
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


def start():
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def gradients():
    draw = torch.Generator().manual_seed(1)
    return [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def settings(name, *, momentum=None, decay=DECAY):
    return OptimizerSettings(name, BETAS, momentum, EPS, decay)


def stepped(parameters, optimizers):
    """The parameters after STEPS steps at a rate that changes from step to step."""
    for number, step in enumerate(gradients(), 1):
        for name, gradient in step.items():
            parameters[name].grad = gradient.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR / number
            optimizer.step()
    return parameters


def by_hand(name, parameters, momentum):
    """What a user of the library would write, from its documentation alone."""
    embed, matrix, bias, head = parameters.values()
    adam = {"betas": BETAS, "eps": EPS, "lr": LR}
    outside = [{"params": [embed, head], "weight_decay": DECAY}, {"params": [bias], "weight_decay": 0.0}]
    everything = [{"params": [embed, matrix, head], "weight_decay": DECAY}, {"params": [bias], "weight_decay": 0.0}]
    match name:
        case "adamw":
            return [torch.optim.AdamW(everything, **adam)]
        case "adamw_8bit":
            return [AdamW8bit([matrix], weight_decay=DECAY, **adam), torch.optim.AdamW(outside, **adam)]
        case "adafactor":
            return [Adafactor(everything, lr=LR, scale_parameter=False, relative_step=False)]
        case "rmsprop":
            more = {} if momentum is None else {"optim_args": f"momentum={momentum}"}
            asked = TrainingArguments("unused", optim="rmsprop", learning_rate=LR, adam_epsilon=0.1, **more)
            made, keys = Trainer.get_optimizer_cls_and_kwargs(asked)  # AdamW's epsilon is none of its settings
            return [made(everything, **keys)]
        case "sgd":
            return [torch.optim.SGD(everything, lr=LR, momentum=momentum or 0.0)]
        case "muon":
            chosen = {"momentum": 0.95 if momentum is None else momentum, "adjust_lr_fn": "match_rms_adamw"}
            return [torch.optim.Muon([matrix], lr=LR, weight_decay=DECAY, **chosen), torch.optim.AdamW(outside, **adam)]


def distance(ours, theirs):
    return max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)


@pytest.mark.parametrize("momentum", [None, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_the_librarys_own(name, momentum):
    ours, theirs = start(), start()
    stepped(ours, [make_optimizer(ours, settings(name, momentum=momentum), decoder=DECODER)])
    stepped(theirs, by_hand(name, theirs, momentum))
    assert distance(ours, theirs) < FP32_ROUNDING
    assert distance(ours, start()) > LR / STEPS  # all of it moved


FACTORS = {"embed": 0.1, "layer.bias": 4.0}
PARTS = {0.1: ["embed"], 4.0: ["layer.bias"], 1.0: ["layer.weight", "head"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_part_with_a_rate_of_its_own_is_as_in_an_optimizer_of_its_own(name):
    def moved(factors, parts):
        """Of an optimizer over everything; of one over each part, at a multiple of the rate."""
        ours, theirs = start(), start()
        whole = make_optimizers({"all": ours}, {"all": settings(name)}, decoder=DECODER, factors=factors)
        pieces = [
            (factor, make_optimizer({key: theirs[key] for key in keys}, settings(name), decoder=DECODER))
            for factor, keys in parts.items()
        ]
        for number, step in enumerate(gradients(), 1):
            for parameters in (ours, theirs):
                for key, gradient in step.items():
                    parameters[key].grad = gradient.clone()
            set_rates(whole, {"all": LR / number})
            whole.step()
            for factor, piece in pieces:
                set_rates(piece, LR / number * factor)
                piece.step()
        return distance(ours, theirs)

    assert moved(FACTORS, PARTS) < FP32_ROUNDING
    assert moved({}, {1.0: [*SHAPES]}) < FP32_ROUNDING
    assert moved({"embed": 0.1}, PARTS) > LR / STEPS  # twin


@pytest.mark.parametrize("name", NAMES)
def test_twin_decay_of_vectors_and_another_momentum_would_be_noticed(name):
    ours, theirs = start(), start()
    for parameters, decay in ((ours, DECAY), (theirs, 0.0)):
        stepped(parameters, [make_optimizer(parameters, settings(name, decay=decay), decoder=DECODER)])
    assert torch.equal(ours["layer.bias"], theirs["layer.bias"])  # not decayed
    for matrix in ("embed", "layer.weight", "head"):
        assert (ours[matrix] - theirs[matrix]).abs().max() > 100 * FP32_ROUNDING
    if name in ("rmsprop", "sgd", "muon"):
        other = start()
        stepped(other, [make_optimizer(other, settings(name, momentum=0.5), decoder=DECODER)])
        assert distance(ours, other) > 100 * FP32_ROUNDING


@pytest.mark.parametrize(("name", "entry"), [("muon", "momentum_buffer"), ("adamw_8bit", "absmax1")])
def test_only_matrices_of_the_decoder_leave_adamw(name, entry):
    parameters = start()
    optimizer = make_optimizer(parameters, settings(name), decoder=DECODER)
    stepped(parameters, [optimizer])
    assert isinstance(optimizer, CombinedOptimizer)
    assert {name for name, parameter in parameters.items() if entry in optimizer.state[parameter]} == DECODER
    assert all("exp_avg" in optimizer.state[parameters[name]] for name in SHAPES.keys() - DECODER)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(SHAPES)


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
@pytest.mark.parametrize("chosen", [["layer.weight"], ["embed", "layer.bias"]])
def test_one_kind_alone_needs_one_optimizer(name, chosen):
    parameters = {key: value for key, value in start().items() if key in chosen}
    optimizer = make_optimizer(parameters, settings(name), decoder=DECODER)
    assert not isinstance(optimizer, CombinedOptimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(chosen)


def test_adafactor_moves_what_starts_at_zero_at_the_rate_itself():
    """Why torch's own Adafactor is not used: it scales every step by the size of the parameter, at least 0.001."""
    ours, theirs = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    optimizer = make_optimizer({"lora_B": ours}, settings("adafactor"), decoder=())
    for parameter, one in ((ours, optimizer), (theirs, torch.optim.Adafactor([theirs]))):
        parameter.grad = torch.ones(4, 4)
        for group in one.param_groups:
            group["lr"] = LR
        one.step()
    assert ours.detach().abs().mean() == pytest.approx(LR, rel=1e-3)
    assert theirs.detach().abs().mean() == pytest.approx(LR * 1e-3, rel=1e-3)


def test_muons_default_momentum_is_the_librarys():
    assert torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))]).defaults["momentum"] == MUON_MOMENTUM


EXACT = 1e-15  # float64 arithmetic of a handful of operations


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [1 / 3, 2 / 3] + [0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]),
        ("wsd", [1 / 3, 2 / 3, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    ],
)
def test_hand_computed_table(kind, expected):
    schedule = Schedule(kind, peak=1.0, total=8, warmup=2, decay=3)
    assert [schedule.rate(step) for step in range(8)] == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_first_step_moves_and_peak_is_reached_but_never_passed(kind, warmup):
    schedule = Schedule(kind, peak=3e-4, total=20, warmup=warmup, decay=4)
    rates = [schedule.rate(step) for step in range(20)]
    assert rates[0] > 0
    assert rates[warmup] == 3e-4 == max(rates)
    assert min(rates) > 0
    assert Schedule(kind, 1.0, total=1, warmup=0).rate(0) == 1.0  # a run of one step trains at the peak


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("constant", "constant_with_warmup", {}),
        ("inverse_sqrt", "inverse_sqrt", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("linear", "polynomial", {"lr_end": 3e-5}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_from_zero_it_is_the_curve_of_transformers(kind, name, more, warmup):
    """The twin is the usual curve, which differs wherever there is a warm-up."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    theirs = get_scheduler(name, optimizer, warmup, 20, more)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = Schedule(kind, peak=3e-4, total=20, warmup=warmup, from_zero=True, floor=0.1 if more else 0.0)
    usual = replace(ours, from_zero=False)
    assert [ours.rate(step) for step in range(20)] == pytest.approx(rates, abs=EXACT)
    assert ([usual.rate(step) for step in range(20)] == pytest.approx(rates, abs=EXACT)) == (warmup == 0)
