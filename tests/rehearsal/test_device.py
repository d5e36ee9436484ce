"""The pretend GPU refuses what a GPU refuses, so that a rehearsal on it means something."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from helpers.tiny_models import tiny_llama
from rehearsal.runs import ON_THE_PRETEND_GPU
from surefoot.models.load import _move, load_model

pytestmark = ON_THE_PRETEND_GPU


@pytest.fixture
def device():
    from pretend_cuda import device

    yield device()
    device().set_limit(80 << 30)


def on_gpu(*shape, **options):
    return torch.randn(*shape, device="cuda", **options)


MIXED = {
    "a product with a host's matrix": lambda: on_gpu(2, 3) @ torch.randn(3, 2),
    "a host's mask": lambda: torch.where(torch.ones(3, dtype=torch.bool), on_gpu(3), on_gpu(3)),
    "ids on the host": lambda: F.embedding(torch.tensor([0, 1]), on_gpu(4, 2)),
    "targets on the host": lambda: F.cross_entropy(on_gpu(3, 5), torch.tensor([0, 1, 2])),
    "a gathered index on the host": lambda: on_gpu(3, 5).gather(1, torch.zeros(3, 1, dtype=torch.long)),
    "a sum in place": lambda: on_gpu(3).add_(torch.randn(3)),
    "concatenated": lambda: torch.cat([on_gpu(2), torch.randn(2)]),
    "moments on the host": lambda: torch._foreach_lerp_([on_gpu(3)], [torch.randn(3)], 0.1),
    "the host's generator": lambda: torch.randn(3, device="cuda", generator=torch.Generator("cpu")),
    "as an array": lambda: on_gpu(3).numpy(),
    "FlashAttention in fp32": lambda: torch.ops.aten._flash_attention_forward(
        *3 * [on_gpu(4, 2, 8)], *2 * [torch.tensor([0, 4], device="cuda", dtype=torch.int32)], 4, 4, 0.0, True, False
    ),
}


@pytest.mark.parametrize("mixture", MIXED)
def test_mixtures_are_refused(mixture):
    with pytest.raises((RuntimeError, TypeError)):
        MIXED[mixture]()


def test_scalars_and_indices_of_the_host_are_not_mixtures():
    numbers = on_gpu(4)
    assert torch.equal((numbers * torch.tensor(2.0)).cpu(), 2 * numbers.cpu())
    assert torch.equal(numbers[torch.tensor([2, 0])].cpu(), numbers.cpu()[[2, 0]])


def test_what_nobody_has_written_is_not_finite():
    assert not torch.isfinite(torch.empty(64, device="cuda")).any()


def test_a_copy_that_does_not_block_is_late():
    """Read before somebody waits for it, it is not there; a source that changes before, is copied as it is then."""
    kept, numbers = torch.zeros(4).pin_memory(), torch.ones(4, device="cuda")
    kept.copy_(numbers, non_blocking=True)
    assert kept.tolist() != [1.0] * 4
    torch.cuda.synchronize()
    assert kept.tolist() == [1.0] * 4
    source = torch.ones(4).pin_memory()
    there = source.to("cuda", non_blocking=True)
    source.fill_(2.0)
    assert there.cpu().tolist() == [2.0] * 4


def test_a_copy_from_memory_that_is_not_pinned_is_taken_at_once():
    source = torch.ones(4)
    there = source.to("cuda", non_blocking=True)
    source.fill_(2.0)
    assert there.cpu().tolist() == [1.0] * 4


def test_memory_has_an_end(device):
    device.set_limit(device.memory()["held"] + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device="cuda")
    assert torch.empty(1 << 10, device="cuda").numel() == 1 << 10


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.isnan().any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x.abs().multinomial(1),
    ],
)
def test_waits_are_counted(device, wait):
    numbers = on_gpu(4)
    before = len(device.waits())
    (numbers * 2).sum(), numbers.view(2, 2), numbers.clone(), torch.arange(3, device="cuda")
    assert len(device.waits()) == before
    wait(numbers)
    assert len(device.waits()) > before


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_is_a_function_of_the_devices_seed(causal):
    """Its gradient is that of the numbers it computed, by differences."""
    parts = [on_gpu(2, heads, 5, 8).requires_grad_() for heads in (4, 2, 2)]
    weights = on_gpu(2, 4, 5, 8)

    def summed(*given):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(*given, dropout_p=0.5, is_causal=causal, enable_gqa=True)
        return (out * weights).sum()

    first = summed(*parts)
    assert first.item() == summed(*parts).item()
    first.backward()
    with torch.no_grad():
        other = F.scaled_dot_product_attention(*parts, dropout_p=0.5, is_causal=causal, enable_gqa=True)
        assert float((other * weights).sum()) != first.item()  # the generator has gone on
        for place, one in enumerate(parts):
            step = on_gpu(*one.shape) * 1e-2
            more, less = (summed(*parts[:place], one + sign * step, *parts[place + 1 :]) for sign in (1, -1))
            wanted = float((step * one.grad).sum())
            assert float(more - less) / 2 == pytest.approx(wanted, abs=2e-3)  # fp32, and the third derivative


def test_depthwise_convolutions_are_those_of_a_cpu():
    x, weight, bias = torch.randn(2, 4, 9, 9), torch.randn(8, 1, 3, 3), torch.randn(8)
    found = F.conv2d(*(one.to("cuda") for one in (x, weight, bias)), stride=2, padding=1, groups=4)
    torch.testing.assert_close(found.cpu(), F.conv2d(x, weight, bias, stride=2, padding=1, groups=4))


def test_draws_follow_the_devices_own_seed():
    torch.manual_seed(3)
    first = on_gpu(4)
    torch.default_generator.manual_seed(3)  # the host's alone
    assert not torch.equal(first, on_gpu(4))
    torch.manual_seed(3)
    assert torch.equal(first, on_gpu(4))


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_documents_are_attended_to_one_by_one(groups):
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, 3, 8], device="cuda", dtype=torch.int32)
    q = on_gpu(8, 2, 16, dtype=torch.bfloat16).requires_grad_()
    k, v = (on_gpu(8, 2 // groups, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    found = varlen_attn(q, k, v, ends, ends, 5, 5, window_size=(-1, 0), enable_gqa=groups > 1)
    found.float().square().sum().backward()
    gradients = [one.grad.float().cpu() for one in (q, k, v)]
    wide = [one.detach().float().cpu().requires_grad_() for one in (q, k, v)]
    rows = [one.transpose(0, 1) for one in (wide[0], *(x.repeat_interleave(groups, 1) for x in wide[1:]))]
    documents = [[one[:, a:b] for one in rows] for a, b in ((0, 3), (3, 8))]
    parts = [F.scaled_dot_product_attention(*document, is_causal=True) for document in documents]
    wanted = torch.cat(parts, 1).transpose(0, 1)
    wanted.square().sum().backward()
    torch.testing.assert_close(found.float().cpu(), wanted, atol=2e-2, rtol=2e-2)  # rounding to bf16
    for own, other in zip(gradients, wide, strict=True):
        torch.testing.assert_close(own, other.grad, atol=5e-2, rtol=5e-2)


def test_a_models_weights_arrive_as_they_are_in_the_file_and_tied_ones_stay_tied(tmp_path):
    base = tiny_llama(tmp_path, tied=True)
    here, there = (
        load_model(base, dtype=torch.float32, attention_implementation="sdpa", device=torch.device(device))
        for device in ("cpu", "cuda")
    )
    assert {one.device.type for one in (*there.parameters(), *there.buffers())} == {"cuda"}
    assert there.lm_head.weight is there.model.embed_tokens.weight
    assert there.state_dict().keys() == here.state_dict().keys()
    for name, tensor in here.state_dict().items():
        assert torch.equal(there.state_dict()[name].cpu(), tensor), name


def test_every_thread_that_moves_weights_is_told_the_number_of_the_device():
    """CUDA's current device is a thread's own: without the number those of all ranks would be on the first one."""
    asked = []

    class Weight(SimpleNamespace):
        def to(self, device):
            asked.append(device)
            return self

    own = [SimpleNamespace(data=Weight()) for _ in range(3)]
    _move(SimpleNamespace(parameters=lambda: own, to=asked.append), torch.device("cuda"))
    assert asked == [torch.device("cuda", torch.cuda.current_device())] * 4
