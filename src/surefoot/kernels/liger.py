"""RMSNorm with Liger-Kernel's Triton kernel (Hsu et al. 2024, arXiv 2410.10989), on a GPU.

Importing this module needs no liger-kernel; the first call does. It saves x in its own dtype and one fp32 number per
row. `surefoot.kernels.pointwise` has the formula, its variants and the reference code.
"""

from __future__ import annotations

import torch

from surefoot.kernels.pointwise import NormForm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Compute RMSNorm of x [..., N] with weight [N]; differentiable in both."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    rounding = "llama" if form.narrow_first else "gemma"
    # False: otherwise its backward pass overwrites the gradient of its output, which other parts of a layer may read.
    found = LigerRMSNormFunction.apply(x, weight, form.eps, form.shift, rounding, False)
    return found.to(form.output_type(x.dtype, weight.dtype))
