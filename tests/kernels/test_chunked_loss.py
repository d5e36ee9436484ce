"""The head and its loss a few positions at a time, against F.cross_entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.devices import DEVICES
from surefoot.kernels import chunked_loss
from surefoot.kernels.chunked_loss import Head, first_choices, plain_losses, summed_loss, token_losses

N, H, V = 37, 24, 301
FP64 = 1e-12  # sums of some hundred float64 numbers in another order
FP32 = 1e-5  # the same in fp32
# A product of 8 or 11 bits, rounded once more: the plain path multiplies by the loss's factor before it rounds.
NARROW = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = [1, 5, 16, N, 100]


def problem(dtype=torch.float64, *, trains=True, bias=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(trains)
    shift = torch.randn(V, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(trains) if bias else None
    return hidden, weight, shift, torch.randint(0, V, (N,), generator=draw)


def gradients(loss, *tensors, retain=False):
    wanted = [one for one in tensors if one is not None and one.requires_grad]
    return torch.autograd.grad(loss, wanted, retain_graph=retain or None)


def relative(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300))


def assert_close(found, wanted, tolerance):
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == two.dtype
        assert relative(one, two) <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32)])
@pytest.mark.parametrize("bias", [True, False])
def test_sum_and_gradients(bias, dtype, tolerance):
    hidden, weight, shift, targets = problem(dtype, bias=bias)
    for rows in ROWS:
        wanted = F.cross_entropy(F.linear(hidden, weight, shift), targets, reduction="sum")
        found = summed_loss(hidden, Head(weight, shift, rows), targets)
        assert_close([found], [wanted], tolerance)
        # Behind the sum stands what a step does: divided by the weight of the step, times a loss scale.
        pair = (gradients(one * 7 / N, hidden, weight, shift) for one in (found, wanted))
        assert_close(*pair, tolerance)


# What models do to z = W h + b, as transformers writes it.
CHANGES = {
    "cap": ({"cap": 3.0}, lambda z: torch.tanh(z / 3.0) * 3.0),
    "scale": ({"scale": 0.3}, lambda z: z * 0.3),
    "both": ({"scale": 2.0, "cap": 5.0}, lambda z: torch.tanh(z * 2.0 / 5.0) * 5.0),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32)])
@pytest.mark.parametrize("change", CHANGES)
def test_logits_that_the_model_changes(change, dtype, tolerance):
    settings, changed = CHANGES[change]
    hidden, weight, shift, targets = problem(dtype)
    wanted = F.cross_entropy(changed(F.linear(hidden, weight, shift)), targets, reduction="none")
    factors = torch.linspace(-2, 3, N, dtype=dtype)
    for rows in ROWS:
        found = summed_loss(hidden, Head(weight, shift, rows, **settings), targets)
        assert_close([found], [wanted.sum()], tolerance)
        pair = (torch.autograd.grad(one, [hidden, weight, shift], retain_graph=True) for one in (found, wanted.sum()))
        assert_close(*pair, tolerance)
        frozen = Head(weight.detach(), shift.detach(), rows, **settings)
        assert_close([plain_losses(hidden, frozen, targets)], [wanted], tolerance)
        single = token_losses(hidden, frozen, targets)
        assert_close(gradients(single @ factors, hidden), gradients(wanted @ factors, hidden, retain=True), tolerance)
    unchanged = summed_loss(hidden, Head(weight, shift, 8), targets)
    assert relative(unchanged, wanted.sum()) > tolerance  # twin


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_the_model_changes_under_autocast(device, change, narrow, monkeypatch):
    """They are changed in fp32. A GPU, which writes gradients in 16 bits at once, has the same bits."""
    settings, changed = CHANGES[change]
    hidden, weight, _, targets = problem(torch.float32, bias=False)
    hidden, weight, targets = (one.detach().to(device) for one in (hidden, weight, targets))
    hidden.requires_grad_(), weight.requires_grad_()

    def found():
        with torch.autocast(device, dtype=narrow):
            loss = summed_loss(hidden, Head(weight, None, 8, **settings), targets)
        return [loss.detach(), *gradients(loss * 7 / N, hidden, weight)]

    output = F.linear(hidden.to(narrow), weight.to(narrow)).float()
    wanted = F.cross_entropy(changed(output), targets, reduction="sum")
    usual = found()
    assert relative(usual[0], wanted) <= FP32
    assert_close(usual[1:], gradients(wanted * 7 / N, hidden, weight), NARROW[narrow])
    monkeypatch.setattr(chunked_loss, "_casts_in_kernels", lambda products: True)
    assert all(map(torch.equal, found(), usual))


def test_single_losses_with_weights_of_their_own():
    hidden, weight, shift, targets = problem(trains=False)
    factors = torch.linspace(-2, 3, N, dtype=torch.float64)
    for rows in ROWS:
        wanted = plain_losses(hidden, Head(weight, shift, rows), targets)
        found = token_losses(hidden, Head(weight, shift, rows), targets)
        assert_close([found], [wanted], FP64)
        assert_close(gradients((factors * found).sum(), hidden), gradients((factors * wanted).sum(), hidden), FP64)


def test_against_a_table_by_hand():
    """Two words with logits 0 and log 3: shares 1/4 and 3/4."""
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [float(torch.tensor(3.0, dtype=torch.float64).log())]], dtype=torch.float64)
    loss = summed_loss(hidden, Head(weight, None, 1), torch.tensor([1]))
    assert loss.item() == pytest.approx(-torch.tensor(0.75, dtype=torch.float64).log().item(), rel=FP64)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.item() == pytest.approx(float((0.75 - 1) * weight[1, 0]), rel=FP64)


@pytest.mark.parametrize("narrow", NARROW)
def test_under_autocast_it_computes_as_the_plain_path_does(narrow):
    hidden, weight, _, targets = problem(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=narrow):
        wanted = plain_losses(hidden, Head(weight, None, 8), targets).sum()
        found = summed_loss(hidden, Head(weight, None, 8), targets)
    assert found.dtype == torch.float32
    assert relative(found, wanted) <= FP32  # the same logits
    assert_close(gradients(found, hidden, weight), gradients(wanted, hidden, weight), NARROW[narrow])


SCALE, WEIGHT = 2.0**16, 1000  # the loss scale that a run in fp16 begins with, and tokens of a step


def confident(margin):
    """Tokens that the model is sure of, as most are late in a run: `margin` is the logit of the right word."""
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 256, generator=draw).half().float()
    targets = torch.randint(0, 64, (32,), generator=draw)
    own = weight[targets]
    hidden = (margin * own / own.square().sum(1, keepdim=True)).half().float()
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def errors_in_fp16(margin):
    """Of the gradients in hidden and weight, chunked and plain, against float64 from the same fp16 logits."""
    hidden, weight, targets = confident(margin)
    with torch.autocast("cpu", dtype=torch.float16):
        shares = F.linear(hidden, weight).detach().double().softmax(1)
        head = Head(weight, None, 8)
        found = gradients(summed_loss(hidden, head, targets) * (SCALE / WEIGHT), hidden, weight)
        plain = gradients(plain_losses(hidden, head, targets).sum() * (SCALE / WEIGHT), hidden, weight)
    wrong = shares.scatter(1, targets.unsqueeze(1), 0.0)
    outer = wrong.scatter(1, targets.unsqueeze(1), -wrong.sum(1, keepdim=True)) * (SCALE / WEIGHT)
    exact = outer @ weight.detach().double(), outer.T @ hidden.detach().double()
    return [[relative(*pair) for pair in zip(some, exact, strict=True)] for some in (found, plain)]


@pytest.mark.parametrize("margin", [8.0, 12.0, 16.0])  # losses of 2e-2, 5e-4 and 1e-5
def test_confident_tokens_lose_no_more_in_fp16_than_under_a_loss_scale(margin):
    found, plain = errors_in_fp16(margin)
    assert all(one <= 1.1 * other for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("margin", [12.0, 16.0])
def test_twin_without_a_lift_they_would(margin, monkeypatch):
    monkeypatch.setattr(chunked_loss, "_HIGHEST_LIFT", 0)
    found, plain = errors_in_fp16(margin)
    assert all(one > 1.1 * other for one, other in zip(found, plain, strict=True))


def large(monkeypatch, lift=None):
    """One word at all positions, and numbers that fp16 still holds."""
    if lift is not None:
        monkeypatch.setattr(chunked_loss, "_lift", lambda bound: torch.tensor(lift))
    hidden, weight = torch.full((32, 4), 20.0, requires_grad=True), torch.full((64, 4), -50.0, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = summed_loss(hidden, Head(weight, None, 32), torch.zeros(32, dtype=torch.long))
    return gradients(loss, hidden, weight)


def test_a_lift_overflows_nothing(monkeypatch):
    found = large(monkeypatch)
    assert all(one.isfinite().all() for one in found)
    assert float(found[1][0, 0]) == pytest.approx(32 * 20 * (1 / 64 - 1), rel=NARROW[torch.float16])
    assert not all(one.isfinite().all() for one in large(monkeypatch, lift=2.0**14))  # the twin


def test_the_gradient_of_a_head_is_summed_in_fp32():
    """bf16 sums of many parts would lose what this one keeps."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, H, generator=draw)
    weight = torch.randn(64, H, generator=draw).requires_grad_()
    targets = torch.randint(0, 64, (512,), generator=draw)
    (exact,) = gradients(plain_losses(hidden.double(), Head(weight.double(), None, 8), targets).sum(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = gradients(summed_loss(hidden, Head(weight, None, 4), targets), weight)
        (plain,) = gradients(plain_losses(hidden, Head(weight, None, 4), targets).sum(), weight)
    assert relative(found, exact) <= 1.1 * relative(plain, exact)


def test_no_gradient_is_formed_where_none_is_wanted():
    hidden, weight, shift, targets = problem(torch.float32)
    head = Head(weight, shift, 8)
    with torch.no_grad():
        assert not summed_loss(hidden, head, targets).requires_grad
        assert relative(token_losses(hidden, head, targets), plain_losses(hidden, head, targets)) <= FP32
        assert torch.equal(first_choices(hidden, head), F.linear(hidden, weight, shift).argmax(-1))
    assert summed_loss(hidden, Head(weight.detach(), None, 8), targets).grad_fn is not None


def test_nothing_supervised_is_zero_with_gradients_of_zero():
    hidden, weight, shift, targets = problem()
    loss = summed_loss(hidden[:0], Head(weight, shift, 8), targets[:0])
    assert loss.item() == 0
    assert not any(one.any() for one in gradients(loss, hidden, weight, shift))


def test_single_losses_of_a_head_that_trains_are_refused():
    hidden, weight, shift, targets = problem()
    with pytest.raises(ValueError, match="sum"):
        token_losses(hidden, Head(weight, shift, 8), targets)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_that_is_written_in_16_bits_at_once_is_the_same_bit_for_bit(monkeypatch, trains, bias):
    """As on a GPU, with fewer passes over what the logits take. With a bias, whose gradient is in fp32, it is not."""
    wide = []
    real = chunked_loss.CrossEntropy.__call__

    def seen(loss, logits, part, wanted, narrow=None):
        losses, gradient = real(loss, logits, part, wanted, narrow)
        wide.append(gradient.dtype == torch.float32)
        return losses, gradient

    monkeypatch.setattr(chunked_loss.CrossEntropy, "__call__", seen)

    def found():
        hidden, weight, shift, targets = problem(torch.bfloat16, trains=trains, bias=bias)
        loss = summed_loss(hidden, Head(weight, shift, 16), targets)
        return [loss, *gradients(loss, hidden, weight, shift)]

    usual = found()
    assert all(wide)
    wide.clear()
    monkeypatch.setattr(chunked_loss, "_casts_in_kernels", lambda products: True)
    assert all(torch.equal(one, two) for one, two in zip(found(), usual, strict=True))
    assert set(wide) == {bias}


@pytest.mark.parametrize("change", ["another word", "no bias", "a head in other rows"])
def test_a_wrong_kernel_would_be_seen(change):
    """The twin."""
    hidden, weight, shift, targets = problem()
    wanted = plain_losses(hidden, Head(weight, shift, 8), targets).sum()
    wrong = {
        "another word": (Head(weight, shift, 8), targets.roll(1)),
        "no bias": (Head(weight, None, 8), targets),
        "a head in other rows": (Head(weight.roll(1, 0), shift, 8), targets),
    }[change]
    found = summed_loss(hidden, *wrong)
    with pytest.raises(AssertionError):
        assert_close([found], [wanted], FP64)
    with pytest.raises(AssertionError):
        assert_close(gradients(found, hidden), gradients(wanted, hidden), FP64)


def test_no_tensor_of_all_positions_and_words_exists():
    """Every tensor that the kernel makes is seen; the plain path's logits are the twin."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numbers = max(self.numbers, out.numel())
            return out

    hidden, weight, _, targets = problem(torch.float32, trains=False, bias=False)
    sizes = {}
    for name, loss in (("ours", summed_loss), ("plain", lambda *all: plain_losses(*all).sum())):
        with Largest() as seen:
            loss(hidden, Head(weight, None, 4), targets).backward()
        sizes[name] = seen.numbers
    assert sizes["ours"] <= max(4 * V, V * H)
    assert sizes["plain"] >= N * V > sizes["ours"]


class Taken(TorchDispatchMode):
    """How often room for the logits of a part was asked for."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.times, self._known = numbers, 0, set()
        self._kept = []  # alive, so that no address comes again

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() == self.numbers:
            place = out.untyped_storage().data_ptr()
            self.times += place not in self._known
            self._known.add(place)
            self._kept.append(out)
        return out


def times_taken(parts):
    hidden, weight, _, targets = problem(torch.bfloat16, trains=False, bias=False)
    with Taken(4 * V) as taken:
        summed_loss(hidden[: 4 * parts], Head(weight, None, 4), targets[: 4 * parts])
    return taken.times


def test_room_for_logits_is_taken_once_for_all_parts():
    """In the type of the products and in fp32. At 128 k words each is more than an allocator keeps."""
    assert times_taken(1) == times_taken(8) == 2


def test_twin_room_of_its_own_for_every_part_is_noticed(monkeypatch):
    def anew(room, x, weight, bias):
        return F.linear(x, weight, bias)

    monkeypatch.setattr(chunked_loss._Room, "output", anew)
    assert times_taken(8) > 8


def widened_at_once():
    """The most numbers of 16 bits that are added to fp32 in one go, while a head of 64 words trains."""

    class Added(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.add_.Tensor and args[0].dtype != args[1].dtype:
                self.numbers = max(self.numbers, args[1].numel())
            return function(*args, **(kwargs or {}))

    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(64, H, generator=draw).requires_grad_()
    targets = torch.randint(0, 64, (16,), generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16), Added() as seen:
        summed_loss(torch.randn(16, H, generator=draw), Head(weight, None, 4), targets).backward()
    return seen.numbers


def test_the_product_of_a_head_that_trains_is_widened_in_parts(monkeypatch):
    """torch widens what is added before it adds: of 32 000 words and 768 numbers that is 94 MiB."""
    monkeypatch.setattr(chunked_loss, "_WIDENED", 16)
    assert widened_at_once() == 16 * H


def test_twin_added_in_one_go_all_of_it_is_widened(monkeypatch):
    monkeypatch.setattr(chunked_loss, "_WIDENED", 64)
    assert widened_at_once() == 64 * H
