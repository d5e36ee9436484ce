"""Replacements for packages of kernels that compute their functions with torch, correctly or incorrectly.

install("flash_attn_3", tmp_path, "right")     # a folder for sys.path and PYTHONPATH
install_liger(tmp_path, "right")               # the same for liger-kernel
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from surefoot.system.hardware import ATTENTION_PACKAGES

_RIGHT = """
import torch
from torch.nn.functional import scaled_dot_product_attention

asked = []  # of each call: whether for gradients that are the same each time


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    deterministic=False,
):
    asked.append(deterministic)
    assert q.ndim == 3 and cu_seqlens_q.dtype == torch.int32 and causal
    ends = cu_seqlens_q.tolist()
    parts = []
    for begin, end in zip(ends, ends[1:]):
        one = (tensor[begin:end].transpose(0, 1)[None] for tensor in (q, k, v))
        found = scaled_dot_product_attention(*one, is_causal=True, scale=softmax_scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts), None
"""
KINDS = {
    "right": _RIGHT,
    "wrong": _RIGHT.replace("scale=softmax_scale", "scale=1.1 * softmax_scale"),
    "not finite": _RIGHT.replace("torch.cat(parts)", "torch.cat(parts) * float('nan')"),
    "cannot be imported": "raise ImportError('undefined symbol: _ZN3c10')",
    "without the function": "version = 1",
}


def install(form: str, folder: Path, kind: str) -> Path:
    """Write the package and return its folder. form: a key of `ATTENTION_PACKAGES`."""
    path = folder.joinpath(*ATTENTION_PACKAGES[form].split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(KINDS[kind])
    return folder


# Signatures, what is returned and saved, and what is overwritten, as in liger-kernel 0.8.5.
_NORM = """
import torch


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert casting_mode in ("llama", "gemma") and not in_place
        ctx.save_for_backward(X, W)
        ctx.given = (eps, offset, casting_mode)
        return norm(X, W, *ctx.given)

    @staticmethod
    def backward(ctx, dY):
        X, W = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            found = torch.autograd.grad(norm(X, W, *ctx.given), (X, W), dY)
        return *found, None, None, None, None, None


def norm(X, W, eps, offset, casting_mode):
    rows = X.float() * torch.rsqrt(X.float().pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        return (W * rows.to(X.dtype)).to(X.dtype)
    return (rows * (offset + W.float())).to(X.dtype)
"""
_ROPE = """
import torch


def turned(x, cos, sin):
    x = x.transpose(1, 2).contiguous()
    half = cos.shape[-1] // 2
    cos, sin = (one[..., :half].unsqueeze(2) for one in (cos, sin))
    first, second = (part.to(cos.dtype) for part in (x[..., :half], x[..., half : 2 * half]))
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x.data[..., : 2 * half] = turned.to(x.dtype)
    return x.transpose(1, 2)


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return turned(q, cos, sin), turned(k, cos, sin), cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return turned(dq, cos, -sin), turned(dk, cos, -sin)
"""
_GATED = """
import torch
from torch.nn import functional as F


def NAME_forward(a, b):
    shape = a.shape
    a, b = (one.view(-1, shape[-1]) for one in (a, b))
    return a, b, formula(a, b).view(shape)


def NAME_backward(a, b, dc):
    inputs = [one.detach().clone().requires_grad_() for one in (a, b)]
    with torch.enable_grad():
        found = torch.autograd.grad(formula(*inputs), inputs, dc)
    for one, gradient in zip((a, b), found):
        one.data.copy_(gradient)
    return a, b


def formula(a, b):
    return ACTIVATION * b
"""
_SWIGLU = _GATED.replace("NAME", "swiglu").replace("ACTIVATION", "F.silu(a)")
_GEGLU = _GATED.replace("NAME", "geglu").replace("ACTIVATION", "F.gelu(a, approximate='tanh')")
_LIGER = {"rms_norm": _NORM, "rope": _ROPE, "swiglu": _SWIGLU, "geglu": _GEGLU}
# Kind -> (key of `kernels:`, module, its source) of the one that is not right.
LIGER_KINDS = {
    "right": None,
    "wrong": ("pointwise", "rms_norm", _NORM.replace("+ eps)", "+ 2 * eps)")),
    "gradient wrong": ("pointwise", "rms_norm", _NORM.replace("return *found,", "return 1.1 * found[0], found[1],")),
    "not finite": ("pointwise", "rms_norm", _NORM.replace("rows.to(X.dtype)", "rows.to(X.dtype) * float('nan')")),
    "cannot be imported": ("pointwise", "rms_norm", "raise ImportError('No module named triton')"),
    "rotary wrong": ("rotary", "rope", _ROPE.replace("-sin), turned(dk", "sin), turned(dk")),
    "gated wrong": ("gated", "swiglu", _SWIGLU.replace("copy_(gradient)", "copy_(1.1 * gradient)")),
}


@contextmanager
def liger_installed(folder: Path, kind: str = "right") -> Iterator[None]:
    """Context in which the package can be imported. Nothing of it is left: what is imported counts as installed."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
            del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install_liger(folder, kind))
        forget()
        try:
            yield
        finally:
            forget()


def install_liger(folder: Path, kind: str) -> Path:
    """Write the package and return its folder. kind: a key of `LIGER_KINDS`."""
    path = folder / "liger_kernel" / "ops"
    path.mkdir(parents=True)
    for one in (path.parent, path):
        (one / "__init__.py").write_text("")
    wrong = LIGER_KINDS[kind]
    for name, source in {**_LIGER, **({wrong[1]: wrong[2]} if wrong else {})}.items():
        (path / f"{name}.py").write_text(source)
    return folder
