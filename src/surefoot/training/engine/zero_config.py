"""The whole configuration that DeepSpeed runs with: one pure function, for the engine and for whoever prints it."""

from __future__ import annotations

from typing import Any, Literal

_BUCKET = 500_000_000  # elements of a message; DeepSpeed's own default
_NEVER = 2**31 - 1


def deepspeed_config(
    *, stage: Literal[1, 2, 3], offload: Literal["none", "optimizer", "all"], world: int, trained: int, pinned: bool
) -> dict[str, Any]:
    """stage: of ZeRO. offload: to host memory. trained: parameters that train. pinned: page-locked host memory.

    What the step does itself is off: accumulation, clipping, loss scaling, dtypes. Under ZeRO 3 every weight is shared
    out, however small, and freed as soon as its module has run: stages call the model in other orders than DeepSpeed's
    record of the last step foresees (rollouts, references, evaluations), and what it fetched ahead would be wrong.
    """
    place = {"device": "cpu", "pin_memory": pinned}
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": max(1, min(_BUCKET, trained)),  # a buffer of this size is allocated
    }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    if offload != "none":
        zero["offload_optimizer"] = place
    if offload == "all":
        zero["offload_param"] = place
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }
