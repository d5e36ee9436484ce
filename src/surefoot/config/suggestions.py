"""Find the config key that an unknown one was meant to be: its siblings first, then all keys and other tools' names."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.config.keys import Key, all_keys
from surefoot.system.messages import CLOSE as CLOSE_BESIDE
from surefoot.system.messages import likeness, plain_name

_OTHERS = {  # key -> names in other tools
    # model and tokenizer
    "model": "model_name_or_path model_name base_model model_id pretrained_model",
    "model.revision": "model_revision",
    "tokenizer.pad": "pad_token special_tokens",
    "tokenizer.add": "tokens add_tokens added_tokens resize_vocab",
    "tokenizer.add_special": "add_special_tokens new_special_tokens additional_special_tokens",
    # adapter
    "adapter.kind": "finetuning_type adapter_name peft_type use_dora",
    "adapter": "use_peft lora",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "lora_target lora_target_modules lora_target_linear target_modules",
    "adapter.rslora": "use_rslora",
    "adapter.start": "init_lora_weights pissa_init",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    # data
    "data.train": "dataset datasets dataset_name dataset_path data_path train_data train_file train_dataset",
    "data.eval": "eval_dataset test_datasets valid_file validation_file val_size val_set_size",
    "data.template": "chat_template prompt_template",
    "data.template_arguments": "chat_template_kwargs enable_thinking reasoning_effort",
    "data.max_length": "cutoff_len sequence_len max_seq_len max_seq_length model_max_length",
    "data.train_on": "train_on_inputs train_on_prompt completion_only_loss assistant_only_loss",
    # arithmetic
    "precision": "bf16 fp16 fp32 dtype torch_dtype mixed_precision",
    "precision.tf32": "allow_tf32",
    "attention": "attn attn_implementation flash_attn flash_attention sdp_attention sdp_kernel",
    "attention.flash": "disable_flash_sdpa enable_flash_sdp",
    "attention.cudnn": "disable_cudnn_sdpa enable_cudnn_sdp",
    "compile": "torch_compile enable_torch_compile torch_compile_mode",
    "gradient_checkpointing": "use_gradient_checkpointing disable_gradient_checkpointing activation_checkpointing",
    # steps
    "batch.size": "batch_size global_batch_size train_batch_size gradient_accumulation_steps accumulation_steps",
    "batch.micro": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "optim.name": "optimizer",
    "optim.lr": "learning_rate",
    "optim.rates": "loraplus_lr_ratio embedding_lr embedding_learning_rate lr_groups lora_learning_rate",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.warmup": "warmup_ratio warmup_steps",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "gradient_clipping clip_grad_norm",
    "duration": "epochs num_epochs num_train_epochs steps max_steps num_steps",
    # log, save, evaluate
    "log_every": "logging_steps log_interval",
    "eval_every": "eval_steps eval_step eval_strategy evals_per_epoch",
    "checkpoint.every": "save_step save_steps save_strategy saves_per_epoch",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model",
    "early_stopping.patience": "early_stopping_patience",
    "early_stopping.min_delta": "early_stopping_threshold",
    "samples.count": "generate_samples",
    "bos.prepend": "add_bos_token",
    "bos.scale": "bos_scaling_factor use_bos_zero_training",
    "output": "output_dir run_dir",
    "seed": "random_seed data_seed",
}
ELSEWHERE: dict[str, str] = dict.fromkeys(
    ("threads", "num_threads", "cpu_threads", "torch_num_threads", "omp_num_threads"),
    "threads are set in the environment: OMP_NUM_THREADS=2 surefoot …",
)
"""Name of what is no key of a config -> where it is set."""
OTHER_NAMES = {name: key for key, names in _OTHERS.items() for name in names.split()}


CLOSE = 0.8  # minimum similarity (0 to 1) for suggesting a name from another group


def nearest_key(path: str, given: Mapping[str, object] | None = None) -> Key | None:
    """Return the key most similar to an unknown dotted path, None if nothing is close.

    given: the keys beside it; a required one that is not among them is what an unlike name most likely means.
    """
    keys = all_keys()
    group, _, name = path.rpartition(".")
    name = plain_name(name)
    neighbors = [key for key in keys.values() if key.group == group]
    if (
        group in keys
        and neighbors  # none: its entries are described by the key itself, as those of grpo.rewards
        and (beside := max(((likeness(name, key.name), key) for key in neighbors), key=_score))[0] >= CLOSE
    ):
        return beside[1]  # so that data.train.epoch is not taken for duration
    if (known := OTHER_NAMES.get(name)) is not None:
        return keys[known]
    lacking = [key for key in neighbors if given is not None and group and key.required and key.name not in given]
    if len(lacking) == 1:
        return lacking[0]
    same_name = [key for key in keys.values() if key.name == name]
    if len(same_name) == 1:
        return same_name[0]
    ours = [(likeness(name, key.name), key) for key in keys.values()]
    theirs = [(likeness(name, other), keys[path]) for other, path in OTHER_NAMES.items()]
    beside = max((scored for scored in ours if scored[1].group == group), key=_score, default=(0.0, None))
    best = max((scored for scored in ours + theirs if _within(scored[1], group)), key=_score, default=(0.0, None))
    if beside[0] >= max(CLOSE_BESIDE, best[0] - 0.1):  # prefer its own group unless another name fits clearly better
        return beside[1]
    return best[1] if best[0] >= CLOSE else None


def _within(key: Key, group: str) -> bool:
    """Return whether a key is a candidate: in an existing group only its own keys, otherwise any key."""
    return group not in all_keys() or key.group == group


def _score(scored: tuple[float, Key | None]) -> float:
    return scored[0]
