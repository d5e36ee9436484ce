"""Rows for the flags of DeepSpeed-Chat's four `main.py`.

Facts: the argument parsers of DeepSpeedExamples (applications/DeepSpeed-Chat), including flags that were renamed since
its first version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from surefoot.interop.settings import (
    OF_THE_HUB,
    Row,
    all_listed,
    by_name,
    carried,
    joint,
    listed,
    refused,
    text,
    whole,
)

Step = Literal["sft", "reward", "dpo", "ppo"]
DATA = ["Dahoas/rm-static"]
_RECOMPUTED = "trades time for memory, with the same results; the plan decides if it is not given"
_SHARED = "for several processes; a single process holds everything"
_ENGINE = "surefoot generates answers in the training process, with a key-value cache"
_ENDS = "every answer ends with the tokenizer's EOS"
_FP32 = "losses are always computed in fp32"


def _names(value: Any) -> list[str]:
    """Read one name or a list of names."""
    return [str(one) for one in (value if isinstance(value, list) else [value])]


_DATA = (
    joint("data_path", DATA, ("data.train", "data.eval"), "hub datasets, files, folders, local/jsonfile", type=_names),
    joint("data_split", "2,4,4", ("data.train", "data.eval"), "shares of the steps, drawn with the seed", type=text),
    listed("data_output_path", "/tmp/data_files/", "shares follow from the seed, and caches are identified by "
           "content"),
)  # fmt: skip
_RUN = (
    joint("lr_scheduler_type", "cosine", ("optim.schedule",), type=text),
    joint("gradient_accumulation_steps", 1, ("batch.size",)),
    joint("num_train_epochs", 1, ("duration",)),
    joint("dtype", "fp16", ("precision.compute",), "trained weights are fp32, like DeepSpeed's master weights",
          type=text),
    joint("output_dir", None, ("output",), "default ./output: a run is always saved", type=text),
    listed("local_rank", -1, "is set by a launcher"),
    joint("offload", False, ("parallel.offload",), "with ZeRO; one process offloads the optimizer, without enable_ema"),
    joint("only_optimize_lora", False, ("adapter.modules_to_save",), "without it, all that has no LoRA trains too"),
    listed("compute_fp32_loss", False, _FP32),
    carried("enable_tensorboard", False, "report_to", lambda on: ["tensorboard"] if on else []),
    listed("tensorboard_path", "tensorboard", "TensorBoard files are in the run folder"),
    refused("add_eot_token", False, "surefoot adds no tokens except PAD", f"leave it out: {_ENDS}"),
    listed("deepspeed", False, "zero_stage and offload configure it"),
    refused("deepspeed_config", None, "contains settings that surefoot does not read"),
    listed("deepspeed_mpi", False, "is about starting processes"),
)  # fmt: skip


def _one_model(length: int, rate: float) -> tuple[Row, ...]:
    """Return the rows that steps 1 and 2 share. length: default sequence length in tokens; rate: learning rate."""
    return (
        *_DATA,
        carried("model_name_or_path", None, "model.path", type=text, required=OF_THE_HUB),
        joint(
            "per_device_train_batch_size", 16, ("batch.size", "batch.micro"), "times accumulation steps and processes"
        ),
        listed("per_device_eval_batch_size", 16, "evaluation batches are sized to the memory that training leaves"),
        carried("max_seq_len", length, "data.max_length"),
        joint("learning_rate", rate, ("optim.lr",), "of all but LoRA, which has lora_learning_rate"),
        carried("weight_decay", 0.0, "optim.weight_decay"),
        joint("num_warmup_steps", 0, ("optim.warmup", "optim.warmup_from_zero")),
        joint("seed", 1234, ("seed",), type=whole),
        joint("gradient_checkpointing", False, ("gradient_checkpointing",), _RECOMPUTED),
        joint("dropout", None, ("model.dropout",), "dropout of the model's own layers", type=float),
        joint("disable_dropout", False, ("model.dropout",), "the old name of dropout: 0.0"),
        joint("zero_stage", 0, ("parallel.engine", "parallel.zero_stage"), _SHARED),
        joint("lora_dim", 0, ("adapter.kind", "adapter.rank", "adapter.alpha"), "scaled by 1/rank; merged at the end"),
        joint("lora_module_name", "decoder.layers.", ("adapter.targets",), "must match a module name", type=text),
        joint("lora_learning_rate", 5e-4, ("optim.rates", "optim.lr"), "optim.lr if nothing else trains"),
        *_RUN,
    )


_LOSS = listed("print_loss", False, "the loss of every step is logged")
_STEP1 = (
    joint("sft_only_data_path", [], ("data.train",), "datasets used whole in step 1", type=_names),
    listed("eot_token", "<|endoftext|>", "belongs to add_eot_token"),
    _LOSS,
)
_STEP2 = (
    joint("num_padding_at_beginning", 1, ("reward.num_padding_at_beginning",), "default auto"),
    joint("eval_interval", 0, ("eval_every",), "steps; 0: once an epoch"),
    listed("eval_iters", 100, "evaluation reads all held-out pairs"),
)  # fmt: skip
_DPO = (
    carried("beta", 0.1, "alignment.beta"),
    carried("label_smoothing", 0.0, "alignment.label_smoothing"),
    listed("offload_reference_model", False, "the reference shares the policy's weights under an adapter; "
           "alignment.reference: cached needs no second model"),
)  # fmt: skip
_STEP3 = (
    *_DATA,
    joint("unsupervised_dataset_name", None, ("ppo.unsup_data", "ppo.unsup_coef"), type=text),
    joint("unsupervised_dataset_config_name", None, ("ppo.unsup_data",), "the subset; required there", type=text),
    joint("unsup_coef", 27.8, ("ppo.unsup_coef",), "used only with unsupervised data"),
    carried("actor_model_name_or_path", None, "model.path", type=text, required=OF_THE_HUB),
    carried("critic_model_name_or_path", None, "ppo.reward", None, "reward model, and the critic's initial weights",
            type=text, required=OF_THE_HUB),
    listed("num_padding_at_beginning", 1, "surefoot knows the end of an answer by position"),
    joint("per_device_generation_batch_size", 16, ("ppo.rollout_batches",)),
    joint("per_device_training_batch_size", 16, ("batch.size", "batch.micro")),
    joint("generation_batches", 1, ("ppo.rollout_batches",)),
    carried("ppo_epochs", 1, "ppo.epochs"),
    joint("max_prompt_seq_len", 256, ("data.max_length",)),
    joint("max_answer_seq_len", 256, ("data.max_length", "ppo.max_new_tokens")),
    joint("actor_learning_rate", 9.65e-6, ("optim.lr",)),
    joint("critic_learning_rate", 5e-6, ("ppo.critic_lr",)),
    carried("actor_weight_decay", 0.0, "optim.weight_decay"),
    carried("critic_weight_decay", 0.0, "ppo.critic_weight_decay"),
    joint("num_warmup_steps", 100, ("optim.warmup", "optim.warmup_from_zero")),
    joint("seed", None, ("seed",), "default 1234, so that the shares match steps 1 and 2",
          type=whole),
    listed("preprocessing_num_workers", None, "affects speed only, not results"),
    *all_listed(_ENGINE, enable_hybrid_engine=False, unpin_actor_parameters=False, release_inference_cache=False),
    *all_listed(_ENGINE, inference_tp_size=1, tp_gather_partition_size=8),
    listed("offload_reference_model", False, "the plan places the reference model, and results do not depend on it"),
    listed("offload_reward_model", False, "the plan places the reward model, and results do not depend on it"),
    joint("actor_zero_stage", 0, ("parallel.engine", "parallel.zero_stage"), _SHARED),
    joint("critic_zero_stage", 0, ("parallel.engine", "parallel.zero_stage"), _SHARED),
    joint("actor_gradient_checkpointing", False, ("gradient_checkpointing",), _RECOMPUTED),
    joint("critic_gradient_checkpointing", False, ("gradient_checkpointing",), _RECOMPUTED),
    joint("actor_dropout", None, ("model.dropout",), type=float),
    joint("critic_dropout", None, ("model.dropout",), type=float),
    joint("disable_actor_dropout", False, ("model.dropout",), "the old name of actor_dropout: 0.0"),
    joint("disable_critic_dropout", False, ("model.dropout",), "the old name of critic_dropout: 0.0"),
    joint("actor_lora_dim", 0, ("adapter.kind", "adapter.rank", "adapter.alpha"), "scaled by 1/rank; merged"),
    joint("actor_lora_module_name", "decoder.layers.", ("adapter.targets",), "must match a module name", type=text),
    joint("critic_lora_dim", 0, ("ppo.critic_adapter",), "scaled by 1/rank; 0: all of the critic trains"),
    joint("critic_lora_module_name", "decoder.layers.", ("ppo.critic_adapter",), "must match a module name",
          type=text),
    joint("actor_lora_learning_rate", 5e-4, ("optim.rates", "optim.lr"), "optim.lr if nothing else trains"),
    joint("critic_lora_learning_rate", 5e-4, ("ppo.critic_lr",), "also of the value head, which LoRA freezes there"),
    joint("enable_ema", False, ("ppo.ema",), "decay 0.992, fixed there"),
    refused("enable_mixed_precision_lora", False, "surefoot has no ZeRO++ weight format"),
    listed("align_overflow", False, "a step updates both actor and critic, or neither"),
    listed("print_answers", False, "use surefoot generate with any checkpoint"),
    listed("print_answers_interval", 1, "belongs to print_answers"),
    joint("enable_test_mode", False, ("duration",)),
    joint("test_stop_step", 0, ("duration",), "used only with enable_test_mode"),
    *_RUN,
)  # fmt: skip

_BASE = _one_model(512, 1e-3)
STEPS: Mapping[Step, Mapping[str, Row]] = {
    "sft": by_name(*_BASE, *_STEP1),
    "reward": by_name(*_one_model(512, 5e-5), *_STEP2),
    "dpo": by_name(*_BASE, _LOSS, *_DPO),
    "ppo": by_name(*_STEP3),
}
ALIASES: Mapping[Step, Mapping[str, str]] = {
    "sft": {},
    "reward": {},
    "dpo": {},
    "ppo": {
        "per_device_train_batch_size": "per_device_generation_batch_size",
        "per_device_mini_train_batch_size": "per_device_training_batch_size",
        "generation_batch_numbers": "generation_batches",
    },
}


LISTS = ("data_path", "sft_only_data_path")
