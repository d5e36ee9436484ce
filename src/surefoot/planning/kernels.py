"""What torch's attention kernels can run, as rules that need no torch. Tests hold them against torch's own dispatch.

CPU: flash (any dtype, mask or not, no dropout) and math. CUDA, from torch's SDPA source: flash fp16 and bf16 from
capability 8.0 on, heads up to 256, no mask; mem_efficient any dtype, bf16 from 8.0 on; cuDNN as flash, with a mask too.
"""

from __future__ import annotations

from surefoot.planning.plan import DType, SdpaKernel
from surefoot.system.hardware import Hardware

# The order in which the run prefers them; torch's own but for cuDNN, which it puts first on Hopper and Blackwell only.
ORDER: tuple[SdpaKernel, ...] = ("cudnn", "flash", "mem_efficient", "math")
_FLASH_HEAD_DIM = 256
_SIXTEEN_BITS = "computes in fp16 and bf16 only, and this run computes in fp32"


def mask_reason(window: int | None, longest: int) -> str:
    """Why SDPA gets a mask instead of the word that attention is causal; empty where it gets none.

    window: tokens that a layer with a sliding window sees. longest: tokens of the longest example.
    """
    if window is None or longest < window:
        return ""
    return f"a window of {window} tokens over examples of up to {longest} needs one"


def obstacle(
    kernel: SdpaKernel, hardware: Hardware, compute: DType, head_dim: int, dropout: float, masked: str = ""
) -> str:
    """Why this kernel cannot run, as the end of a sentence that begins with its name; empty where it can.

    masked: the `mask_reason` of the run.
    """
    if kernel == "math":
        return ""
    if hardware.kind != "cuda":
        if kernel != "flash" or hardware.kind == "mps":
            return "exists only on NVIDIA GPUs"
        return f"has no dropout on a CPU, and the model has attention_dropout {dropout:g}" if dropout else ""
    if kernel == "flash" and masked:
        return f"takes no mask on a GPU, and {masked}"
    capability = hardware.capability or (0, 0)
    if kernel == "mem_efficient":
        return "computes bf16 only from capability 8.0 on" if compute == "bf16" and capability < (8, 0) else ""
    if compute == "fp32":
        return _SIXTEEN_BITS
    if capability < (8, 0):
        return f"needs compute capability 8.0, and {hardware.name} has {capability[0]}.{capability[1]}"
    return f"takes heads of at most {_FLASH_HEAD_DIM} numbers, not {head_dim}" if head_dim > _FLASH_HEAD_DIM else ""


def flash_attention_2_obstacles(hardware: Hardware, compute: DType) -> list[str]:
    """Why the flash-attn package cannot run here, each as the end of a sentence."""
    if hardware.kind != "cuda":
        return ["needs an NVIDIA GPU"]
    found = []
    if (hardware.capability or (0, 0)) < (8, 0):
        found.append(f"needs compute capability 8.0, which {hardware.name} lacks")
    if compute == "fp32":
        found.append(_SIXTEEN_BITS)
    if hardware.flash_attention_2 is False:
        found.append("needs the flash-attn package, which is not installed")
    return found
