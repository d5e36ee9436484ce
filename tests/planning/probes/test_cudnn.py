"""cuDNN's attention on a GPU: where its gradients are not finite, the probe has to say so (PyTorch issue 196678)."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.planning.plan import DType
from surefoot.planning.probes.attention import attention_trials
from surefoot.planning.probes.sizes import AttentionRequest

FAR = 120.0  # logits of -FAR everywhere: beyond -88.7, the logarithm of the smallest normal number of fp32
LENGTHS = (64, 192, 704)  # each leaves 64 modulo 128


def gradients_are_finite(dtype: torch.dtype, length: int) -> bool:
    """By torch alone. Raises RuntimeError where cuDNN does not take these shapes."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 4, length, 64, device="cuda", dtype=dtype) for _ in range(4))
    shift = (FAR * 64**0.5) ** 0.5
    q[..., 0], k[..., 0] = shift, -shift
    inputs = [one.requires_grad_() for one in (q, k, v)]
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    return all(torch.isfinite(one).all() for one in torch.autograd.grad(output, inputs, gradient))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cudnn_is_found_out_where_its_gradients_are_not_finite(dtype: DType) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    try:
        finite = all(gradients_are_finite(kind, length) for length in LENGTHS)
    except RuntimeError as error:
        pytest.skip(f"cuDNN does not run here: {error}")
    (trial,) = attention_trials(AttentionRequest(("cudnn",), 4, 4, 64, 704, dtype, "cuda"))
    if not finite:
        assert "not finite" in trial.failure
