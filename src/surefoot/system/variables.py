"""Environment variables that change numbers, kernels, threads or downloads, or are wrongly believed to.

One row each: who reads it, its effect on a run, and whether the config overrides it. Each row was checked in the
sources and libraries of torch 2.13, transformers 5.23 and accelerate 1.15, and a test checks again. None contains a
secret or a path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["used", "overridden", "ignored"]
Device = Literal["cpu", "cuda"]
Below = Literal["never", "compiling", "always"]


@dataclass(frozen=True)
class Variable:
    """Effect of a variable on a run.

    reader: the library that reads it; "" for none.
    effect: a phrase in which {compute}, {tf32}, … are the plan's values.
    verdict: whether it is used, overridden by the config, or ignored.
    device: the only kind of device on which it matters.
    below: when it changes kernels, dtypes or memory independently of the config: always, or with torch.compile. The
        others set what has no config key: threads, devices, allocators, network access.
    """

    reader: str
    effect: str
    verdict: Verdict
    device: Device | None = None
    below: Below = "never"


LAUNCHED_THREADS = "SUREFOOT_THREADS"  # set beside OMP_NUM_THREADS by surefoot's launcher, to the same number

_NOBODY = Variable("", "nothing reads this name", "ignored")
_CONFIG_KERNELS = "nothing reads this name; attention.* in the config decides: {attention}"
_BELIEVED_KERNEL = Variable("", _CONFIG_KERNELS, "ignored")
_THREADS = Variable("torch", "sets the number of CPU threads: {threads}", "used")
_PRECISION = "surefoot computes as the config says: {compute}"
_ISA = Variable(
    "oneDNN",
    "limits the instructions of matrix products; bf16 can become hundreds of times slower",
    "used",
    "cpu",
    "always",
)
_FPMATH = Variable("oneDNN", "allows it to round fp32 operands", "used", "cpu", "always")
_MKL = Variable("MKL", "selects code paths of fp32 matrix products: different rounding", "used", "cpu")
_ALLOCATOR = Variable("torch", "changes how GPU memory is allocated, not the numbers", "used", "cuda")
_NO_COMPILE = Variable("torch", "switches torch.compile off (compile is {compile})", "used", below="compiling")
_OFFLINE = Variable("huggingface_hub", "nothing is downloaded; models come from the cache", "used")

VARIABLES: dict[str, Variable] = {
    "ACCELERATE_DOWNCAST_BF16": Variable("accelerate", _PRECISION, "overridden"),
    "ACCELERATE_DYNAMO_BACKEND": Variable(
        "accelerate", "surefoot compiles as the config says: {compile}", "overridden"
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Variable(
        "accelerate", "batch.size and batch.micro decide: {accumulation} micro-batches", "overridden"
    ),
    "ACCELERATE_MIXED_PRECISION": Variable("accelerate", _PRECISION, "overridden"),
    "ACCELERATE_USE_CPU": Variable("accelerate", "surefoot runs on {device}", "overridden"),
    "ACCELERATE_USE_DEEPSPEED": Variable("accelerate", "parallel.engine in the config decides", "ignored"),
    "ACCELERATE_USE_FSDP": Variable("accelerate", "parallel.engine in the config decides", "ignored"),
    "ATEN_CPU_CAPABILITY": Variable(
        "torch", "limits torch's vector instructions: slower, different rounding", "used", "cpu", below="always"
    ),
    "ATTN_IMPLEMENTATION": _BELIEVED_KERNEL,
    "CUBLAS_WORKSPACE_CONFIG": Variable("cuBLAS", "fixes its workspaces; makes products repeatable", "used", "cuda"),
    "CUDA_LAUNCH_BLOCKING": Variable(
        "CUDA", "waits after every kernel: slow, for debugging", "used", "cuda", below="always"
    ),
    "CUDA_VISIBLE_DEVICES": Variable("CUDA", "sets the GPUs that are visible to this process", "used"),
    "DNNL_DEFAULT_FPMATH_MODE": _FPMATH,
    "DNNL_MAX_CPU_ISA": _ISA,
    "HF_HUB_OFFLINE": _OFFLINE,
    "MKL_CBWR": _MKL,
    "MKL_ENABLE_INSTRUCTIONS": replace(_MKL, below="always"),
    "MKL_NUM_THREADS": _THREADS,
    "NVIDIA_TF32_OVERRIDE": Variable(
        "cuBLAS, cuDNN", "sets TF32 in CUDA's libraries: {tf32}", "used", "cuda", below="always"
    ),
    "OMP_NUM_THREADS": _THREADS,
    "ONEDNN_DEFAULT_FPMATH_MODE": _FPMATH,
    "ONEDNN_MAX_CPU_ISA": _ISA,
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": replace(_ALLOCATOR, below="always"),
    "PYTORCH_SDPA_BACKEND": _BELIEVED_KERNEL,
    "PYTORCH_SDP_KERNEL": _BELIEVED_KERNEL,
    "SDPA_BACKEND": _BELIEVED_KERNEL,
    "TORCHDYNAMO_DISABLE": _NO_COMPILE,
    "TORCHINDUCTOR_MAX_AUTOTUNE": Variable(
        "torch", "makes compilation try more kernels (compile is {compile})", "used", below="compiling"
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Variable(
        "torch", "would allow TF32; precision.tf32 is set after it: {tf32}", "overridden", "cuda"
    ),
    "TORCH_BLAS_PREFER_CUBLASLT": Variable(
        "torch", "uses another library for matrix products", "used", "cuda", below="always"
    ),
    "TORCH_COMPILE_DISABLE": _NO_COMPILE,
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": Variable(
        "torch for CUDA",
        "puts cuDNN last; attention.* decides which kernels may run: {attention}",
        "overridden",
        "cuda",
    ),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": Variable(
        "torch", "lets torch.load run code from a pickle; surefoot opens no pickle", "ignored"
    ),
    "TORCH_NUM_THREADS": _NOBODY,
    "TORCH_SDPA_BACKEND": _BELIEVED_KERNEL,
    "TRANSFORMERS_ATTN_IMPLEMENTATION": _BELIEVED_KERNEL,
    "TRANSFORMERS_OFFLINE": _OFFLINE,
    "TRANSFORMERS_SDPA_FORCE_GQA": Variable(
        "transformers", "keeps grouped keys and values unrepeated in SDPA even with a mask", "used", below="always"
    ),
}
