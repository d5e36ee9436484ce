"""Rows for ms-swift's own settings; those of transformers' Trainer are in `interop.trainer_rows`, those of TRL's
methods in `interop.trl`. Facts: swift/arguments and swift/trainers/arguments.py of ms-swift 4 (August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.interop import trainer
from surefoot.interop.settings import (
    OF_THE_HUB,
    OWN_KERNELS,
    Row,
    all_listed,
    by_name,
    carried,
    file_or_group,
    first_values,
    joint,
    listed,
    names,
    number,
    one_of,
    refused,
    text,
    truth,
    whole,
)
from surefoot.interop.shared_rules import OF_TOKENS, switch
from surefoot.interop.trl.group import GRPO_ROWS
from surefoot.interop.trl.methods import METHODS
from surefoot.interop.words import read_value

_LOADING = "affects how batches are loaded, not results"
_SWANLAB = "SwanLab is not one of surefoot's trackers"
_CODE = "surefoot runs no code of another tool"
_CLASSES = "surefoot trains causal language models"
_ATTENTION = {"flash_attn": "flash_attention_2", **{name: name for name in ("flash_attention_2", "sdpa", "eager")}}
_OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
_ZERO: Mapping[str, Any] = {  # its own DeepSpeed files
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "zero2_offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3_offload": {"zero_optimization": _OFFLOADED},
}


def _zero(value: Any) -> Any:
    return _ZERO.get(value, value) if isinstance(value, str) else file_or_group(value)


def _fsdp(value: Any) -> Any:
    return "full_shard auto_wrap" if value == "fsdp2" else value


def listed_names(value: Any) -> list[str]:
    """A list as its flags give it: words, or one word."""
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _mapping(value: Any) -> dict[str, Any]:
    found = read_value(value) if isinstance(value, str) else value
    if not isinstance(found, dict) or not all(isinstance(value, str | int | float) for value in found.values()):
        raise ValueError('a mapping such as {"their_name": "query"}')
    return found


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _drawn(value: Any) -> int:
    return 0 if value == -1 else whole(value)


SHARED: tuple[Row, ...] = (
    joint("model", None, ("model.path",), type=text, required=OF_THE_HUB),
    carried("model_revision", None, "model.revision", type=text),
    listed("model_type", None, "the model's config.json tells its family"),
    refused("task_type", "causal_lm", _CLASSES, "write a surefoot config with stage: reward for scores"),
    *all_listed("belongs to task_type", num_labels=None, problem_type=None, mrl_dims=None),
    joint("torch_dtype", None, ("precision.compute", "precision.base"), type=text),
    joint("bf16", None, ("precision.compute",), "default: as torch_dtype", type=truth),
    joint("fp16", None, ("precision.compute",), "default: as torch_dtype", type=truth),
    carried("attn_impl", None, "attention.implementation", one_of(_ATTENTION), type=text),
    joint("new_special_tokens", None, ("tokenizer.add", "tokenizer.add_special"),
          "control tokens where the template writes them", type=names),
    refused("rope_scaling", None, "surefoot keeps the model's position encoding", "set it in the model's config.json"),
    refused("max_model_len", None, "surefoot keeps the model's position encoding", "max_length shortens texts"),
    *all_listed("surefoot places the model itself", device_map=None, max_memory=None),
    *all_listed("surefoot runs no code from a model's repository", local_repo_path=None, init_strategy=None),
    *all_listed(OWN_KERNELS, experts_impl=None, use_logits_to_keep=None, enable_npu_model_patch=True, check_model=True),
    refused("model_kwargs", None, "surefoot passes no extra arguments when loading"),
    joint("tuner_type", "lora", ("adapter.kind",), "lora or full", type=text),
    refused("tuner_backend", "peft", "surefoot adapts with PEFT's layers"),
    joint("adapters", None, ("adapter.initial",), "one folder, whose adapter_config.json decides", type=listed_names),
    joint("lora_rank", 8, ("adapter.rank",)),
    joint("lora_alpha", 32, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.05, ("adapter.dropout",)),
    joint("target_modules", "all-linear", ("adapter.targets",), type=listed_names),
    joint("target_regex", None, ("adapter.targets",), "a pattern of whole names", type=text),
    refused("target_parameters", None, "adapter.targets names experts", "leave it out: all-linear has them"),
    joint("modules_to_save", None, ("adapter.modules_to_save",), type=listed_names),
    joint("use_rslora", False, ("adapter.rslora",)),
    joint("use_dora", False, ("adapter.kind",)),
    refused("lora_bias", "none", "surefoot's adapters have no biases"),
    listed("lora_dtype", None, "adapters train in fp32"),
    joint("lorap_lr_ratio", None, ("optim.rates",), "LoRA+", type=number),
    joint("init_weights", "true", ("adapter.start",), "true, pissa, pissa_niter_N or olora", type=first_values),
    joint("freeze_llm", False, (), "refused: surefoot trains the language model or an adapter on it"),
    joint("freeze_vit", True, ("vision.tower",), "only with tuner_type: full"),
    joint("freeze_aligner", True, ("vision.projector",), "only with tuner_type: full"),
    refused("freeze_parameters", None, "surefoot names what trains", "write model.trained in a surefoot config"),
    refused("freeze_parameters_regex", None, "surefoot names what trains"),
    refused("freeze_parameters_ratio", 0.0, "surefoot names what trains"),
    refused("trainable_parameters", None, "surefoot's patterns are of modules", "write model.trained"),
    refused("trainable_parameters_regex", None, "surefoot's patterns are of modules", "write model.trained"),
    joint("quant_method", None, ("precision.base",), "bnb", type=text),
    joint("quant_bits", None, ("precision.base",), "4 or 8", type=whole),
    listed("bnb_4bit_compute_dtype", None, "products are computed in the type of training"),
    refused("bnb_4bit_quant_type", "nf4", "surefoot's 4-bit format is nf4"),
    joint("bnb_4bit_use_double_quant", True, ("precision.base",)),
    listed("bnb_4bit_quant_storage", None, "surefoot starts its own processes"),
    listed("hqq_axis", None, "belongs to quant_method: hqq"),
    joint("dataset", None, ("data.train",), "ID_OR_PATH:SUBSET#NUMBER", type=listed_names,
          required="name files or hub data sets"),
    joint("val_dataset", None, ("data.eval",), "ID_OR_PATH:SUBSET#NUMBER", type=listed_names),
    joint("split_dataset_ratio", 0.0, ("data.eval",), "held out", type=number),
    refused("cached_dataset", None, "surefoot caches what it tokenizes by itself", "name the data set in dataset"),
    refused("cached_val_dataset", None, "surefoot caches what it tokenizes by itself", "name it in val_dataset"),
    joint("columns", None, ("data.train",), "their column: ms-swift's name", type=_mapping),
    joint("system", None, ("data.train",), "a source's system message, or a .txt file with it", type=text,
          null=""),
    joint("model_name", None, ("data.train",), "fills {{NAME}} of swift/self-cognition", type=listed_names),
    joint("model_author", None, ("data.train",), "fills {{AUTHOR}} of swift/self-cognition", type=listed_names),
    joint("use_hf", False, ("data.train", "model.path"), "surefoot always reads the Hugging Face hub"),
    joint("streaming", False, ("data.train",), "needs max_steps"),
    listed("shuffle_buffer_size", 1000, "all records of a stream are shuffled together"),
    joint("dataset_shuffle", True, ("data.order",), "off with train_dataloader_shuffle: the order of the files"),
    joint("train_dataloader_shuffle", True, ("data.order",), "off with dataset_shuffle: the order of the files"),
    listed("val_dataset_shuffle", False, "the order of evaluation does not affect results"),
    refused("interleave_prob", None, "ms-swift ends a mixture with its first data set", "give sources weights"),
    listed("stopping_strategy", "first_exhausted", "belongs to interleave_prob"),
    *all_listed("data is prepared once and cached by content", dataset_num_proc=1, load_from_cache_file=False,
                download_mode="reuse_dataset_if_exists", lazy_tokenize=None, packing_num_proc=1),
    listed("strict", False, "a faulty record is always an error"),
    listed("disable_auto_column_mapping", False, "columns are found by the format"),
    refused("custom_dataset_info", None, "surefoot knows no data sets of ms-swift's", "name files or hub ids"),
    refused("external_plugins", None, _CODE),
    refused("custom_register_path", None, _CODE),
    joint("template", None, ("data.template",), "a name of ms-swift's for Qwen's families", type=text),
    joint("max_length", None, ("data.max_length",), type=whole),
    joint("truncation_strategy", None, ("data.max_length",), "delete, right; split in stage pretrain", type=text),
    joint("use_chat_template", None, ("data.template",), "false: the texts one behind the other", type=truth),
    joint("loss_scale", None, ("data.train_on",), "default, last_round, all, each with ignore_empty_think", type=text),
    joint("agent_template", None, (), "refused where it is not the model's own", type=text),
    listed("response_prefix", None, "applies to generation"),
    joint("enable_thinking", None, (), "applies to generation, which surefoot leaves to the template", type=truth),
    refused("preserve_thinking", None, "the template decides what is kept of earlier turns"),
    refused("add_non_thinking_prefix", True, "the template decides about empty thoughts"),
    refused("disable_ignore_empty_think", False, "empty thoughts are not learned"),
    refused("template_backend", "swift", "ms-swift trains with its own templates"),
    carried("max_pixels", None, "data.max_pixels", type=whole),
    listed("norm_bbox", None, "surefoot writes coordinates as the data have them"),
    *all_listed("padding does not affect results here", padding_free=False, padding_side="right"),
    joint("packing", False, ("batch.row_tokens",), "rows of max_length"),
    joint("packing_length", None, ("batch.row_tokens",), "default: max_length", type=whole),
    listed("packing_strategy", "binpack", "surefoot fills rows anew in every epoch"),
    joint("sequence_parallel_size", 1, ("batch.size",), "processes of one batch; surefoot keeps sequences whole"),
    listed("is_binary_loss_scale", None, "labels are learned or not"),
    carried("per_device_train_batch_size", 1, "batch.micro"),
    joint("gradient_accumulation_steps", None, ("batch.size",), "default: 16 examples in a step", type=whole),
    joint("learning_rate", None, ("optim.lr",), "default: 1e-4, all weights 1e-5", type=number),
    carried("weight_decay", 0.1, "optim.weight_decay"),
    joint("adam_beta2", 0.95, ("optim.betas",)),
    joint("lr_scheduler_type", "cosine", ("optim.schedule",)),
    joint("lr_scheduler_kwargs", None, ("optim.floor",), "min_lr, min_lr_rate, lr_end", type=_mapping),
    joint("optimizer", None, ("optim.name",), "muon", type=text),
    refused("vit_lr", None, "its names depend on the model", "write optim.rates in a surefoot config"),
    refused("aligner_lr", None, "its names depend on the model", "write optim.rates in a surefoot config"),
    carried("gradient_checkpointing", True, "gradient_checkpointing", switch),
    listed("vit_gradient_checkpointing", None, "all variants give the same gradients"),
    carried("router_aux_loss_coef", 0.0, "model.router_aux_loss_coef"),
    joint("enable_dft_loss", False, ("sft.loss",), OF_TOKENS),
    listed("enable_channel_loss", False, "the loss of each source is logged"),
    refused("acc_strategy", "token", "surefoot counts tokens", "leave it out"),
    joint("output_dir", None, ("output",), "default: output/MODEL", type=text),
    listed("add_version", True, "surefoot writes into the folder itself, and replaces no run unasked"),
    listed("create_checkpoint_symlink", False, "the best checkpoint is published in the run folder"),
    *all_listed("surefoot only writes safetensors", safe_serialization=True, max_shard_size="5GB"),
    refused("load_args", False, "surefoot's configs are whole", "write out the settings of its args.json"),
    listed("load_data_args", False, "belongs to load_args"),
    joint("eval_strategy", None, ("eval_every",), "default: as save_strategy", type=text),
    joint("report_to", "tensorboard", ("report_to",), "tensorboard, wandb, mlflow, trackio", type=listed_names),
    listed("logging_first_step", True, "the first step is always logged"),
    joint("logging_steps", 5, ("log_every",), type=number),
    joint("data_seed", 42, ("seed",), "surefoot has one seed for everything", type=whole),
    joint("early_stop_interval", None, ("early_stopping.patience",), "needs evaluation data", type=whole),
    listed("eval_metric", None, "the loss, and token accuracy, are always measured"),
    refused("eval_use_evalscope", False, "surefoot measures benchmarks afterwards", "surefoot evaluate harness"),
    *all_listed("belongs to eval_use_evalscope", eval_dataset=None, eval_dataset_args=None, eval_limit=None,
                eval_generation_config=None, extra_eval_args=None),
    refused("resume_only_model", False, "a run goes on whole", "use adapters, or name the folder in model"),
    refused("max_epochs", None, "num_train_epochs or max_steps ends training", "give one of these"),
    refused("callbacks", None, _CODE),
    refused("loss_type", None, _CLASSES),
    joint("deepspeed", None, ("parallel.engine", "parallel.zero_stage", "parallel.offload"), "zero2, …, or a file",
          type=_zero),
    joint("fsdp", None, ("parallel.engine",), "fsdp2, as in Trainer", type=_fsdp),
    refused("deepspeed_autotp_size", None, "surefoot keeps layers whole"),
    listed("zero_hpz_partition_size", None, "several machines only"),
    *all_listed(_LOADING, dataloader_num_workers=None, dataloader_prefetch_factor=None),
    *all_listed("surefoot starts its own processes", ddp_timeout=18000000, ddp_backend=None, use_ray=False),
    refused("use_galore", False, "surefoot has no GaLore", "use adapter: lora, or optim: adafactor"),
    refused("lisa_activated_layers", 0, "surefoot has no LISA", "use adapter: lora"),
    listed("lisa_step_interval", 20, "belongs to lisa_activated_layers"),
    listed("per_device_eval_batch_size", 1, "evaluation batches are sized to the memory that training leaves"),
    listed("use_flash_ckpt", False, "checkpoints are written beside the next steps"),
    listed("use_swift_lora", False, "surefoot adapts with PEFT's layers"),
    listed("ignore_args_error", False, "unknown settings are errors"),
    listed("hub_token", None, "surefoot uses HF_TOKEN or `hf auth login`", secret=True),
    *(listed(f"swanlab_{name}", None, _SWANLAB, secret=name in ("token", "secret", "webhook_url"))
      for name in ("token", "project", "workspace", "exp_name", "notification_method", "webhook_url", "secret",
                   "mode")),
    *all_listed("applies to generation", max_new_tokens=None, stop_words=None, stream=None, num_beams=1),
    *all_listed("applies to generation", logprobs=False, top_logprobs=None, structured_outputs_regex=None),
    listed("ds3_gather_for_generation", True, "applies to generation"),
    *all_listed("applies to generation", repetition_penalty=None, top_k=None, top_p=None, temperature=None),
)  # fmt: skip
_OF_TUNERS = ("adalora_", "boft_", "vera_", "fourier_", "llamapro_", "reft_", "lora_ga_", "adapter_")
PARTS = {**dict.fromkeys(_OF_TUNERS, "tuner_type"), "galore_": "use_galore", "swanlab_": "report_to: swanlab",
         "vllm_": "vLLM, which has flags of its own", "megatron_": "Megatron"}  # fmt: skip

# Names of TRL's rows that each rlhf_type has here too, and the defaults that differ.
_THEIRS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dpo": ("loss_type loss_weights label_smoothing", {}),
    "cpo": ("loss_type cpo_alpha simpo_gamma label_smoothing", {"simpo_gamma": 1.0}),
    "orpo": ("", {}),
    "kto": ("desirable_weight undesirable_weight", {}),
    "reward": ("center_rewards_coefficient", {}),
    "gkd": ("teacher_model_name_or_path lmbda temperature max_new_tokens seq_kd", {"max_new_tokens": 512}),
    "grpo": (
        "reward_funcs reward_model_name_or_path reward_weights num_generations num_generations_eval num_iterations "
        "max_completion_length generation_batch_size steps_per_generation temperature top_p top_k min_p "
        "repetition_penalty epsilon epsilon_high delta mask_truncated_completions use_vllm vllm_mode scale_rewards "
        "vllm_server_base_url vllm_server_host vllm_server_port loss_type importance_sampling_level sync_ref_model "
        "top_entropy_quantile ref_model_mixup_alpha ref_model_sync_steps log_completions use_bias_correction_kl "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        {
            "temperature": 0.9,
            "loss_type": "grpo",
            "use_bias_correction_kl": False,
            "vllm_mode": None,
            "vllm_importance_sampling_correction": False,
        },
    ),
}
# What shapes the answers that a method draws.
_DRAWS: Mapping[str, Any] = {"stop_words": None, "structured_outputs_regex": None, "response_prefix": None,
                             "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}  # fmt: skip
_BETAS = {"dpo": 0.1, "cpo": 0.1, "orpo": 0.1, "kto": 0.1, "reward": 0.1, "gkd": 0.5, "grpo": 0.04}
_METHOD = "is of ms-swift's own and no method of surefoot's"
RLHF: tuple[Row, ...] = (
    joint("rlhf_type", "dpo", ("stage", "alignment.loss"), "dpo, orpo, simpo, kto, cpo, rm, grpo, gkd", type=text),
    joint("beta", None, ("alignment.beta", "grpo.kl", "distill.beta"), "default: 0.1, simpo 2, grpo 0.04, gkd 0.5",
          type=number),
    joint("ref_model", None, ("alignment.reference",), "not with grpo", type=text),
    refused("ref_adapters", None, "surefoot's reference is a model", "merge them first (surefoot export)"),
    joint("rpo_alpha", None, ("alignment.sft",), "rlhf_type: dpo", type=number),
    joint("sft_alpha", 0.0, ("distill.sft",), "rlhf_type: gkd"),
    refused("ld_alpha", None, "surefoot's losses weight all tokens of an answer equally"),
    refused("teacher_model_server", None, "ms-swift's server answers in a form of its own", "distill.teacher: http://…"),
    refused("teacher_adapters", None, "surefoot's teacher is a model", "merge them first (surefoot export)"),
    refused("gkd_logits_topk", None, "surefoot compares with the teacher's whole vocabulary"),
    refused("reward_adapters", None, "surefoot's reward is a model", "merge them first (surefoot export)"),
    refused("reward_model_plugin", None, _CODE),
    refused("advantage_estimator", "grpo", _METHOD),
    refused("kl_in_reward", None, "surefoot's penalty is in the loss", same=(False,)),
    refused("multi_turn_scheduler", None, _CODE, "write a grpo.environment"),
    refused("use_gym_env", None, _CODE, "write a grpo.environment", same=(False,)),
    joint("dynamic_sample", False, ("grpo.redraw",), "max_resample_times"),
    joint("max_resample_times", 3, ("grpo.redraw",)),
    refused("async_generate", False, "draws answers beside the updates; surefoot's way is grpo.ahead"),
    *(refused(name, default, _METHOD) for name, default in {
        "chord_sft_dataset": None, "advantage_reweight": None, "sdar_loss_coef": 0.0,
        "rollout_importance_sampling_mode": None, "off_policy_sequence_mask_delta": None}.items()),
    *all_listed("belongs to a loss or method that is not supported", tau_pos=1.0, tau_neg=1.05, real_tau=0.5,
                discopop_tau=0.05, soft_max_length=None, soft_cache_length=None, max_turns=None, gym_env=None,
                rollout_importance_sampling_threshold=2.0, teacher_kl_coef=1.0, teacher_tag_key="dataset"),
    *all_listed(OWN_KERNELS, offload_optimizer=False, offload_model=False, move_model_batches=None, sleep_level=0,
                offload_teacher_model=False, teacher_deepspeed=None, enable_flattened_weight_sync=True),
    *all_listed("is always logged", log_entropy=False, log_rollout_offpolicy_metrics=False,
                wandb_log_unique_prompts=None),
    *all_listed("the model's config.json tells its family", ref_model_type=None, teacher_model_type=None,
                reward_model_type=None),
    refused("reward_template", None, "surefoot writes a reward model's input with the model's own template"),
    *(refused(f"{name}_model_revision", None, "surefoot reads the hub's default", "name a folder with that revision")
      for name in ("ref", "teacher", "reward")),
    listed("completion_length_limit_scope", "per_round", "belongs to multi_turn_scheduler"),
    listed("vllm_server_pass_dataset", False, "belongs to multi_turn_scheduler"),
)  # fmt: skip
RLHF_PARTS = {**PARTS, "chord_": "chord_sft_dataset", "fipo_": "loss_type: fipo", "cosine_": "another reward",
              "rlsd_": "advantage_reweight", "sdar_": "sdar_loss_coef", "repetition_": "another reward"}  # fmt: skip
RLHF_ALIASES = {
    "overlong_filter": "mask_truncated_completions",
    "reward_model": "reward_model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
}
_OF_PPO = (
    "num_ppo_epochs whiten_rewards kl_coef cliprange vf_coef cliprange_value gamma lam num_mini_batches "
    "response_length local_rollout_forward_batch_size num_sample_generations missing_eos_penalty max_completion_length"
)
_ELSEWHERE = tuple(
    listed(name, None, "belongs to another rlhf_type")
    for names_of in (_OF_PPO, *(found for found, _ in _THEIRS.values()))
    for name in names_of.split()
)
ALIASES = {**trainer.ALIASES, "train_type": "tuner_type", "sft_type": "tuner_type"}
_READ = {
    "top_k": _drawn, "vllm_server_port": lambda value: whole(_first(value)), "vllm_server_host": _first,
    "vllm_server_base_url": _first, "reward_model_name_or_path": _first,
}  # fmt: skip


def rows_of(method: str) -> Mapping[str, Row]:
    """Return the rows of `swift sft`, "" for method, or of an rlhf_type by TRL's name."""
    if not method:
        return by_name(*trainer.ROWS, *SHARED)
    wanted, defaults = _THEIRS[method]
    found = by_name(*(GRPO_ROWS if method == "grpo" else METHODS[method].rows))
    theirs = [
        replace(row, default=defaults.get(row.name, row.default), type=_READ.get(row.name, row.type))
        for name in wanted.split()
        for row in [found[name]]
    ]
    own = [replace(row, default=_BETAS[method]) if row.name == "beta" else row for row in RLHF]
    if method in ("gkd", "grpo"):
        theirs += [
            refused(name, default, "surefoot draws answers without it")
            for name, default in _DRAWS.items()
            if name not in wanted.split()
        ]
    if method == "gkd":
        theirs.append(joint("max_completion_length", None, ("distill.max_new_tokens",), type=whole))
        theirs += all_listed("the student answers by surefoot's own engine", use_vllm=False, vllm_mode=None)
        theirs += all_listed("answers are counted in the log", log_completions=False)
    if method == "grpo":
        theirs.append(refused("teacher_model_name_or_path", None, "surefoot's GRPO learns from scores alone"))
    return by_name(*trainer.ROWS, *_ELSEWHERE, *SHARED, *own, *theirs)
