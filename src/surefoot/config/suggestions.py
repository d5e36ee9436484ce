"""The config key that was meant by an unknown one: its neighbours first, then the whole tree and other tools' names."""

from __future__ import annotations

from surefoot.config.keys import Key, all_keys
from surefoot.system.messages import CLOSE as CLOSE_BESIDE
from surefoot.system.messages import likeness, plain_name

OTHER_NAMES = {
    # model and tokenizer
    "model_name_or_path": "model",
    "model_name": "model",
    "base_model": "model",
    "model_id": "model",
    "pretrained_model": "model",
    "model_revision": "model.revision",
    "pad_token": "tokenizer.pad",
    "special_tokens": "tokenizer.pad",
    "resize_vocab": "tokenizer.pad",
    # adapter
    "finetuning_type": "adapter.kind",
    "adapter_name": "adapter.kind",
    "peft_type": "adapter.kind",
    "use_dora": "adapter.kind",
    "use_peft": "adapter",
    "lora": "adapter",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "lora_target_linear": "adapter.targets",
    "target_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": "adapter.modules_to_save",
    # data
    "dataset": "data.train",
    "datasets": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "data_path": "data.train",
    "train_data": "data.train",
    "train_file": "data.train",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
    "test_datasets": "data.eval",
    "valid_file": "data.eval",
    "validation_file": "data.eval",
    "val_size": "data.eval",
    "val_set_size": "data.eval",
    "chat_template": "data.template",
    "prompt_template": "data.template",
    "cutoff_len": "data.max_length",
    "sequence_len": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "train_on_inputs": "data.train_on",
    "train_on_prompt": "data.train_on",
    "completion_only_loss": "data.train_on",
    "assistant_only_loss": "data.train_on",
    # arithmetic
    "bf16": "precision",
    "fp16": "precision",
    "fp32": "precision",
    "dtype": "precision",
    "torch_dtype": "precision",
    "mixed_precision": "precision",
    "allow_tf32": "precision.tf32",
    "attn": "attention",
    "attn_implementation": "attention",
    "flash_attn": "attention",
    "flash_attention": "attention",
    "sdp_attention": "attention",
    "sdp_kernel": "attention",
    "disable_flash_sdpa": "attention.flash",
    "enable_flash_sdp": "attention.flash",
    "disable_cudnn_sdpa": "attention.cudnn",
    "enable_cudnn_sdp": "attention.cudnn",
    "torch_compile": "compile",
    "enable_torch_compile": "compile",
    "torch_compile_mode": "compile",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "disable_gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    # steps
    "batch_size": "batch.size",
    "global_batch_size": "batch.size",
    "train_batch_size": "batch.size",
    "gradient_accumulation_steps": "batch.size",
    "accumulation_steps": "batch.size",
    "micro_batch_size": "batch.micro",
    "per_device_train_batch_size": "batch.micro",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "optimizer": "optim.name",
    "learning_rate": "optim.lr",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "scheduler": "optim.schedule",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "gradient_clipping": "optim.max_grad_norm",
    "clip_grad_norm": "optim.max_grad_norm",
    "epochs": "duration",
    "num_epochs": "duration",
    "num_train_epochs": "duration",
    "max_steps": "duration",
    # log, save, evaluate
    "logging_steps": "log_every",
    "log_interval": "log_every",
    "eval_steps": "eval_every",
    "eval_step": "eval_every",
    "eval_strategy": "eval_every",
    "evals_per_epoch": "eval_every",
    "save_step": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "saves_per_epoch": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.best",
    "metric_for_best_model": "checkpoint.best",
    "early_stopping_patience": "early_stopping.patience",
    "early_stopping_threshold": "early_stopping.min_delta",
    "generate_samples": "samples.count",
    "add_bos_token": "bos.prepend",
    "bos_scaling_factor": "bos.scale",
    "use_bos_zero_training": "bos.scale",
    "output_dir": "output",
    "run_dir": "output",
    "random_seed": "seed",
    "data_seed": "seed",
}


CLOSE = 0.8  # likeness (0 to 1) below which a name from another group is no suggestion


def nearest_key(path: str) -> Key | None:
    """The key most like an unknown dotted path, None where nothing is close."""
    keys = all_keys()
    group, _, name = path.rpartition(".")
    name = plain_name(name)
    neighbours = [key for key in keys.values() if key.group == group]
    if (
        group in keys
        and (beside := max(((likeness(name, key.name), key) for key in neighbours), key=_score))[0] >= CLOSE
    ):
        return beside[1]  # data.train.epoch is no misplaced duration
    if (known := OTHER_NAMES.get(name)) is not None:
        return keys[known]
    same_name = [key for key in keys.values() if key.name == name]
    if len(same_name) == 1:
        return same_name[0]
    ours = [(likeness(name, key.name), key) for key in keys.values()]
    theirs = [(likeness(name, other), keys[path]) for other, path in OTHER_NAMES.items()]
    beside = max((scored for scored in ours if scored[1].group == group), key=_score, default=(0.0, None))
    best = max((scored for scored in ours + theirs if _within(scored[1], group)), key=_score, default=(0.0, None))
    if beside[0] >= max(CLOSE_BESIDE, best[0] - 0.1):  # near its own group unless another name fits clearly better
        return beside[1]
    return best[1] if best[0] >= CLOSE else None


def _within(key: Key, group: str) -> bool:
    """In an existing group only its own keys are meant; an unknown group, or none, may stand for any."""
    return group not in all_keys() or key.group == group


def _score(scored: tuple[float, Key | None]) -> float:
    return scored[0]
