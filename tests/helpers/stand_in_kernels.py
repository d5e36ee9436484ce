"""Replacements for FlashAttention's packages that compute its function with torch, correctly or incorrectly.

install("flash_attn_3", tmp_path, "right")     # a folder for sys.path and PYTHONPATH
"""

from pathlib import Path

from surefoot.system.hardware import ATTENTION_PACKAGES

_RIGHT = """
import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
):
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
