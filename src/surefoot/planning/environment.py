"""Environment variables: which of those that are set act on this run, which the config beats, and which nobody reads.

Each row was checked in the sources and libraries of torch 2.13, transformers 5.23 and accelerate 1.15; a test looks
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.planning.plan import EnvironmentFinding, RunPlan
from surefoot.planning.threads import THREAD_VARIABLES, asked_threads

Verdict = Literal["used", "overridden", "ignored"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Variable:
    """reader: who reads the name; "" for nobody. effect: a phrase in which {compute}, {tf32}, … are the plan's values.

    device: the only kind of device on which it matters.
    """

    reader: str
    effect: str
    verdict: Verdict
    device: Device | None = None


_NOBODY = Variable("", "nothing reads this name", "ignored")
_CONFIG_KERNELS = "nothing reads this name; attention.* in the config chooses: {attention}"
_BELIEVED_KERNEL = Variable("", _CONFIG_KERNELS, "ignored")
_THREADS = Variable("torch", "sets the number of CPU threads: {threads}", "used")
_PRECISION = "surefoot computes as the config says: {compute}"
_ISA = Variable(
    "oneDNN", "limits the instructions of matrix products; bf16 can become hundreds of times slower", "used", "cpu"
)
_FPMATH = Variable("oneDNN", "allows it to round fp32 operands", "used", "cpu")
_MKL = Variable("MKL", "chooses code paths of fp32 matrix products: other last bits", "used", "cpu")
_ALLOCATOR = Variable("torch", "changes how GPU memory is allocated, not the numbers", "used", "cuda")
_NO_COMPILE = Variable("torch", "switches torch.compile off (compile is {compile})", "used")
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
    "ACCELERATE_USE_DEEPSPEED": Variable("accelerate", "parallel.engine says how memory is shared out", "ignored"),
    "ACCELERATE_USE_FSDP": Variable("accelerate", "parallel.engine says how memory is shared out", "ignored"),
    "ATEN_CPU_CAPABILITY": Variable(
        "torch", "limits torch's vector instructions: slower, other last bits", "used", "cpu"
    ),
    "ATTN_IMPLEMENTATION": _BELIEVED_KERNEL,
    "CUBLAS_WORKSPACE_CONFIG": Variable("cuBLAS", "fixes its workspaces; makes products repeatable", "used", "cuda"),
    "CUDA_LAUNCH_BLOCKING": Variable("CUDA", "waits after every kernel: slow, for debugging", "used", "cuda"),
    "CUDA_VISIBLE_DEVICES": Variable("CUDA", "chooses the GPUs that this process sees", "used"),
    "DNNL_DEFAULT_FPMATH_MODE": _FPMATH,
    "DNNL_MAX_CPU_ISA": _ISA,
    "HF_HUB_OFFLINE": _OFFLINE,
    "MKL_CBWR": _MKL,
    "MKL_ENABLE_INSTRUCTIONS": _MKL,
    "MKL_NUM_THREADS": _THREADS,
    "NVIDIA_TF32_OVERRIDE": Variable("cuBLAS, cuDNN", "decides TF32 below torch: {tf32}", "used", "cuda"),
    "OMP_NUM_THREADS": _THREADS,
    "ONEDNN_DEFAULT_FPMATH_MODE": _FPMATH,
    "ONEDNN_MAX_CPU_ISA": _ISA,
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _ALLOCATOR,
    "PYTORCH_SDPA_BACKEND": _BELIEVED_KERNEL,
    "PYTORCH_SDP_KERNEL": _BELIEVED_KERNEL,
    "SDPA_BACKEND": _BELIEVED_KERNEL,
    "TORCHDYNAMO_DISABLE": _NO_COMPILE,
    "TORCHINDUCTOR_MAX_AUTOTUNE": Variable(
        "torch", "makes compilation try more kernels (compile is {compile})", "used"
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Variable(
        "torch", "would allow TF32; precision.tf32 is set after it: {tf32}", "overridden", "cuda"
    ),
    "TORCH_BLAS_PREFER_CUBLASLT": Variable("torch", "chooses another library for products", "used", "cuda"),
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
        "transformers", "keeps grouped keys and values unrepeated in SDPA even with a mask", "used"
    ),
}


# Those of the above that change kernels, types or memory behind the config's back. The others set what the config
# leaves to the environment: threads, devices, allocators, whether there is a network.
_BELOW = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "CUDA_LAUNCH_BLOCKING",
        "DNNL_DEFAULT_FPMATH_MODE",
        "DNNL_MAX_CPU_ISA",
        "MKL_ENABLE_INSTRUCTIONS",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TRANSFORMERS_SDPA_FORCE_GQA",
    }
)
_OF_COMPILATION = frozenset({"TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_DISABLE"})


def acts_below(name: str, *, compiled: bool) -> bool:
    """Whether a variable that is read overrides what the config says, or slows the run down. compiled: torch.compile
    is on."""
    return name in _BELOW or (compiled and name in _OF_COMPILATION)


def environment_without_plan(
    environment: Mapping[str, str], device: str, threads: int
) -> tuple[EnvironmentFinding, ...]:
    """The same before anything was decided. device: cpu | cuda | mps. threads: that torch takes here."""
    undecided = dict.fromkeys(("attention", "accumulation", "compile", "compute", "tf32"), "the run's own")
    return _findings(environment, device, {**undecided, "device": device, "threads": str(threads)})


def environment_findings(environment: Mapping[str, str], plan: RunPlan) -> tuple[EnvironmentFinding, ...]:
    """One finding per known variable that is set, in the light of what was decided."""
    return _findings(environment, plan.device.value, _values(plan))


def _findings(environment: Mapping[str, str], device: str, values: Mapping[str, str]) -> tuple[EnvironmentFinding, ...]:
    found = []
    for name in sorted(environment.keys() & VARIABLES.keys()):
        variable = VARIABLES[name]
        if variable.device is not None and variable.device != device:
            effect, verdict = f"matters only on {variable.device}; this run is on {device}", "ignored"
        elif name in THREAD_VARIABLES and (unmet := _unmet_threads(environment[name], values["threads"])):
            effect, verdict = unmet
        else:
            effect, verdict = variable.effect.format_map(values), variable.verdict
        prefix = f"read by {variable.reader}: " if variable.reader and verdict != "ignored" else ""
        found.append(EnvironmentFinding(name, environment[name], prefix + effect, verdict))
    return tuple(found)


def _unmet_threads(value: str, used: str) -> tuple[str, Verdict] | None:
    """Effect and verdict of a number of threads that is not the one that computes; None where it is."""
    asked, are = asked_threads(value), "is" if used == "1" else "are"
    if asked is None:
        return f"not a number of threads: {used} {are} used", "ignored"
    return None if str(asked) == used else (f"{asked} asked, {used} {are} used", "overridden")


def _values(plan: RunPlan) -> dict[str, str]:
    """The plan's values by the names that stand in the effects."""
    kernels = ", ".join(plan.attention.kernels.value)
    return {
        "attention": plan.attention.implementation.value + (f" ({kernels})" if kernels else ""),
        "accumulation": str(plan.batch.accumulation),
        "compile": plan.compile.value,
        "compute": plan.precision.compute.value,
        "device": plan.device.value,
        "tf32": "on" if plan.precision.tf32.value else "off",
        "threads": str(plan.threads.value),
    }
