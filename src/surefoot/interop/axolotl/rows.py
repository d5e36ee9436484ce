"""Axolotl's settings, each with its default and outcome. Facts: the config schema of Axolotl 0.19 and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.interop.adapters import ratio_back
from surefoot.interop.axolotl import back
from surefoot.interop.axolotl.methods import BLOCK
from surefoot.interop.axolotl.methods import ROWS as METHOD_ROWS
from surefoot.interop.axolotl.processes import OWN_BATCH, SAME_BATCH
from surefoot.interop.axolotl.trained import unfrozen
from surefoot.interop.backward import (
    clipped,
    differs,
    equals,
    held_out,
    interval,
    keeps_best,
    length,
    never,
    passes,
    reverse,
    share_of_warmup,
    start,
    strategy,
    switched,
    tracked,
    true_if,
    unless,
)
from surefoot.interop.settings import (
    AT_LEAST,
    OF_THE_HUB,
    Row,
    all_listed,
    by_name,
    carried,
    file_or_group,
    first_values,
    group,
    joint,
    listed,
    names,
    number,
    refused,
    text,
    truth,
    whole,
)
from surefoot.interop.shared_rules import OF_TOKENS, switch, template_arguments
from surefoot.interop.trainer_rows import OPTIMIZERS
from surefoot.interop.trainer_rows import ROWS as TRAINER_ROWS

SAVED = 4  # number of checkpoints that Axolotl keeps by default

_OF_THE_TRAINER = ("adam_beta1", "adam_beta2", "adam_epsilon", "seed", "deepspeed", "fsdp")
_NOTHING = (False, 0, "", [], {})


def _refused(about: str, settings: str, fix: str = "leave it out") -> tuple[Row, ...]:
    return tuple(refused(name, None, about, fix, same=_NOTHING) for name in settings.split())


def _flag_or_word(value: Any) -> bool | str:
    """Read true, false, or a string such as auto."""
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower(), str(value))


# A setting that is refused -> those that say how.
_PARTS: Mapping[str, str] = {
    "relora": "relora_prune_method relora_cpu_offload",
    "jagged_restart_steps": "jagged_restart_warmup_steps jagged_restart_anneal_steps",
    "lisa_n_layers": "lisa_layers_attribute",
    "optimizer: dion": "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of",
    "optimizer: q_galore_adamw8bit": "qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type "
    "qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
    "qgalore_queue_size",
    "use_pose": "pose_split_on_token_ids pose_max_context_len pose_num_chunks",
    "scaling_softmax": "scaling_softmax_factor scaling_softmax_bias",
    "pretraining_dataset": "pretrain_multipack_buffer_size streaming_multipack_buffer_size",
    "do_bench_eval": "bench_dataset bench_split",
    "fp8": "fp8_enable_fsdp_float8_all_gather",
    "context_parallel_size": "heads_k_stride ring_attn_func",
    "use_ray": "ray_run_name resources_per_worker",
}


_ROWS: tuple[Row, ...] = (
    # model
    carried("base_model", None, "model.path", type=text, required=OF_THE_HUB),
    joint("tokenizer_config", None, (), "base_model itself; surefoot reads the tokenizer in its folder", type=text),
    carried("revision_of_model", None, "model.revision", type=text),
    joint("reinit_weights", None, ("model.weights",), "without an adapter", type=truth,
          back=true_if("model.weights", "random")),
    joint("adapter", None, ("adapter.kind",), "lora or qlora", type=text, back=back.adapter),
    joint("model_config", None, ("model.router_aux_loss_coef",), "output_router_logits alone", type=group,
          back=lambda ours: {"output_router_logits": True} if ours["model.router_aux_loss_coef"] == "own" else None),
    joint("load_in_8bit", False, ("precision.base",), back=equals("precision.base", "int8")),
    joint("load_in_4bit", False, ("precision.base",), back=equals("precision.base", "nf4")),
    joint("lora_model_dir", None, ("adapter.initial",),
          "a folder, whose adapter_config.json decides rank, alpha, dropout and modules", type=text),
    joint("lora_r", None, ("adapter.rank",), type=whole),
    joint("lora_alpha", None, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.0, ("adapter.dropout",)),
    joint("lora_target_modules", None, ("adapter.targets",), back=back.modules),
    joint("lora_target_linear", False, ("adapter.targets",), "every linear layer except the head",
          back=equals("adapter.targets", "all-linear")),
    joint("lora_modules_to_save", None, ("adapter.modules_to_save",),
          back=unless("adapter.modules_to_save", [], "rest")),
    joint("peft_use_dora", False, ("adapter.kind",), back=equals("adapter.kind", "dora")),
    joint("peft_use_rslora", False, ("adapter.rslora",)),
    joint("peft_init_lora_weights", None, ("adapter.start",), "true, pissa, pissa_niter_N or olora", type=first_values,
          back=start),
    joint("special_tokens", None, ("tokenizer.pad", "tokenizer.eos", "tokenizer.add"),
          "BOS, EOS and UNK must be the model's own, or EOS a new token", type=group, back=back.tokens),
    joint("tokens", None, ("tokenizer.add", "tokenizer.add_special"), "control tokens where the template writes them",
          back=back.added),
    joint("eot_tokens", None, (), "the end of an answer, which surefoot always learns", type=names),
    joint("quantize_moe_experts", False, ("precision.base",), "the experts of a mixture stay in 16 bits here"),
    joint("lora_target_parameters", None, ("adapter.targets",), back=back.parameters),
    joint("processor_type", None, ("vision",), "with the Qwen families that also see", type=text, back=back.processor),
    joint("freeze_mm_modules", False, ("vision",), "tower and projector", back=back.frozen_vision),
    joint("unfrozen_parameters", None, ("model.trained", "vision"), "modules of the language model", type=names,
          back=unfrozen),
    joint("model_quantization_config", None, (), "a base in MXFP4 is decoded while it is loaded", type=text),
    joint("use_eaft", None, ("sft.loss", "sft.entropy"), OF_TOKENS, type=truth, back=true_if("sft.loss", "eaft")),
    joint("eaft_alpha", None, ("sft.alpha",), "default: 1", type=number),
    joint("eaft_k", None, ("sft.top",), "default: 20", type=whole),
    # data
    joint("datasets", None, ("data.train", "data.format", "data.template"), back=back.train),
    joint("pretraining_dataset", None, ("stage", "data.train"), "texts of a stream, with max_steps", back=back.stream),
    joint("streaming", False, ("data.train",), back=never),
    joint("test_datasets", None, ("data.eval",), back=back.held_out),
    joint("val_set_size", 0.0, ("data.eval",), "a fraction, or a count above 1", back=held_out),
    joint("chat_template", None, ("data.template",), type=text, back=back.template),
    joint("chat_template_jinja", None, ("data.template",), type=text, back=back.jinja),
    joint("tokenizer_use_mistral_common", False, ("data.template",),
          "turns are rendered by the tokenizer's own template"),
    joint("sequence_len", 512, ("data.max_length",), "longer examples are truncated; Axolotl drops them",
          back=back.longest),
    joint("excess_length_strategy", None, ("data.max_length",), "surefoot does truncate", type=text,
          back=lambda ours: "truncate"),
    joint("min_sample_len", None, ("data.min_length",), "supervised training alone", type=whole,
          back=unless("data.min_length", 1)),
    joint("dataset_exact_deduplication", False, ("data.unique",)),
    joint("train_on_inputs", False, ("data.train_on",), back=equals("data.train_on", "everything")),
    joint("sample_packing", False, ("batch.row_tokens",),
          "rows of sequence_len tokens, or micro_batch_size times that", back=differs("batch.row_tokens", None)),
    joint("multipack_real_batches", None, ("batch.size", "batch.row_tokens"),
          "default: true unless attention needs no padding (flash_attention_2 and similar)", type=truth,
          back=back.real_batches),
    joint("shuffle_merged_datasets", True, ("data.order",), "off beside curriculum_sampling, for several data sets"),
    joint("curriculum_sampling", None, ("data.order",), "examples in the order of the files", type=truth,
          back=true_if("data.order", "file")),
    joint("sample_packing_sequentially", None, ("data.order",), "with curriculum_sampling", type=truth,
          back=back.in_turn),
    # arithmetic
    joint("bf16", "auto", ("precision.compute",), type=_flag_or_word, null=False,
          back=reverse("precision.compute", {True: "bf16", False: "fp32", "auto": "auto"})),
    joint("fp16", False, ("precision.compute",), back=equals("precision.compute", "fp16")),
    joint("bfloat16", False, ("precision.compute",)),
    joint("float16", False, ("precision.compute",)),
    joint("float32", False, ("precision.compute",)),
    carried("tf32", "auto", "precision.tf32", lambda on: on if on == "auto" else switch(on), type=_flag_or_word,
            null=False, back=switched("precision.tf32")),
    joint("flash_attention", None, ("attention.implementation",), type=truth),
    joint("sdp_attention", None, ("attention.implementation",), type=truth),
    joint("eager_attention", None, ("attention.implementation",), type=truth),
    joint("attn_implementation", None, ("attention.implementation",), type=text,
          back=unless("attention.implementation", "auto")),
    joint("xformers_attention", None, ("attention.implementation",), type=truth),
    joint("flex_attention", None, ("attention.implementation",), type=truth),
    joint("gradient_checkpointing", False, ("gradient_checkpointing",), type=_flag_or_word,
          back=switched("gradient_checkpointing")),
    joint("torch_compile", False, ("compile",), type=_flag_or_word, back=differs("compile", "off")),
    joint("torch_compile_mode", None, ("compile",), type=text, back=unless("compile", "off", "default")),
    # steps
    joint("micro_batch_size", 1, ("batch.micro", "batch.size"), back=back.micro),
    joint("gradient_accumulation_steps", 1, ("batch.size",), back=passes),
    joint("batch_size", None, ("batch.size",), "beside gradient_accumulation_steps: null", type=whole, back=never),
    joint("num_epochs", 1.0, ("duration",), back=length("duration", "epochs")),
    joint("max_steps", None, ("duration",), type=whole, back=length("duration", "steps")),
    carried("learning_rate", None, "optim.lr", type=number, required="set it"),
    joint("optimizer", "adamw_torch_fused", ("optim.name",), type=text, back=reverse("optim.name", OPTIMIZERS)),
    joint("lr_scheduler", "cosine", ("optim.schedule",), type=text, back=back.schedule),
    joint("cosine_min_lr_ratio", None, ("optim.floor",), type=number, back=back.floor),
    joint("warmup_steps", None, ("optim.warmup",), "below 1: a fraction", type=number, back=back.warmup_steps),
    joint("warmup_ratio", None, ("optim.warmup",), type=number, back=share_of_warmup),
    carried("weight_decay", 0.0, "optim.weight_decay"),
    joint("loraplus_lr_ratio", None, ("optim.rates",), "LoRA+", type=number, back=ratio_back),
    *all_listed("is for LoRA on embeddings, which surefoot does not have", "loraplus_lr_embedding"),
    joint("embedding_lr", None, ("optim.rates",), "of embeddings, head and modules_to_save", type=number, back=never),
    joint("embedding_lr_scale", None, ("optim.rates",), "a multiple of learning_rate", type=number, back=never),
    joint("lr_groups", None, ("optim.rates",), "a list of name, modules and lr", back=never),
    carried("max_grad_norm", 1.0, "optim.max_grad_norm", lambda value: value or None,
            back=clipped("optim.max_grad_norm")),
    carried("chat_template_kwargs", None, "data.template_arguments", template_arguments, type=group,
            back=unless("data.template_arguments", {})),
    carried("neftune_noise_alpha", None, "optim.neftune_alpha", type=number),
    # evaluating, saving, logging
    joint("evals_per_epoch", None, ("eval_every",), type=number, back=never),
    joint("eval_steps", None, ("eval_every",), type=number, back=interval("eval_every")),
    joint("eval_strategy", None, ("eval_every",), type=text, back=strategy("eval_every")),
    joint("saves_per_epoch", None, ("checkpoint.every",), type=number, back=never),
    joint("save_steps", None, ("checkpoint.every",), type=number, back=interval("checkpoint.every")),
    joint("save_strategy", None, ("checkpoint.every",), type=text, back=strategy("checkpoint.every")),
    joint("save_total_limit", SAVED, ("checkpoint.keep",), AT_LEAST),
    joint("load_best_model_at_end", False, ("checkpoint.best",), back=keeps_best),
    joint("early_stopping_patience", None, ("early_stopping.patience",), type=whole),
    carried("logging_steps", None, "log_every", type=whole),
    joint("generate_samples", False, ("samples.count",), back=differs("samples.count", 0)),
    joint("num_generation_samples", 3, ("samples.count",)),
    joint("generation_max_new_tokens", 50, ("samples.max_new_tokens",)),
    joint("use_wandb", None, ("report_to",), type=truth, back=lambda ours: "wandb" in ours["report_to"] or None),
    joint("wandb_project", None, ("report_to", "tracking.project"), type=text,
          back=tracked("tracking.project", "wandb")),
    joint("wandb_name", None, ("tracking.name",), type=text, back=tracked("tracking.name", "wandb")),
    joint("wandb_mode", None, ("tracking.offline",), type=text,
          back=lambda ours: "offline" if ours["tracking.offline"] else None),
    joint("use_tensorboard", False, ("report_to",), back=lambda ours: "tensorboard" in ours["report_to"]),
    joint("use_mlflow", False, ("report_to",), back=lambda ours: "mlflow" in ours["report_to"]),
    joint("mlflow_experiment_name", None, ("tracking.project",), type=text, back=tracked("tracking.project", "mlflow")),
    joint("use_trackio", False, ("report_to",), back=lambda ours: "trackio" in ours["report_to"]),
    joint("trackio_project_name", None, ("tracking.project",), type=text, back=tracked("tracking.project", "trackio")),
    carried("output_dir", "./model-out", "output", type=text),
    joint("resume_from_checkpoint", None, (), "--resume"),
    joint("auto_resume_from_checkpoints", False, (), "--resume"),
    joint("hub_model_id", None, (), "--push OWNER/NAME, to a private repository, at the end", type=text),
    joint("plugins", None, (), "Liger and cut cross-entropy affect speed only", type=names),
    *all_listed("surefoot reads this from the model's own files",
             "model_type tokenizer_type type_of_model tokenizer_use_fast tokenizer_legacy is_falcon_derived_model "
             "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model lora_fan_in_fan_out strict "
             "cls_model_config"),
    listed("trust_remote_code", None, "surefoot runs no code from a model's repository"),
    *all_listed("affects how data is prepared and loaded, not results",
             "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_num "
             "num_dataset_shards_to_save preprocess_iterable dataloader_pin_memory dataloader_num_workers "
             "dataloader_prefetch_factor remove_unused_columns hf_use_auth_token is_preprocess axolotl_config_path "
             "skip_prepare_dataset eval_batch_size do_causal_lm_eval include_tokens_per_second include_tkps gc_steps "
             "gc_collect_steps torch_empty_cache_steps low_cpu_mem_usage max_memory gpu_memory_limit "
             "qlora_sharded_model_loading"),
    *all_listed("padding is masked by position and does not affect results",
             "pad_to_sequence_len pad_to_multiple_of eval_sample_packing sample_packing_group_size "
             "sample_packing_bin_size sample_packing_eff_est sample_packing_mp_start_method group_by_length "
             "total_num_tokens"),
    *all_listed("affects speed or memory only; surefoot chooses its own kernels",
             "gradient_checkpointing_kwargs activation_offloading layer_offloading torch_compile_backend "
             "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy "
             "chunked_cross_entropy_num_chunks flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
             "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu liger_cross_entropy "
             "liger_fused_linear_cross_entropy cut_cross_entropy use_kernels tiled_mlp bnb_config_kwargs "
             "experimental_skip_move_to_device fp32_norms liger_rms_norm_gated fused_attn_kernel "
             "gemma4_hybrid_attn_impl flex_attn_compile_kwargs flash_optimum lora_on_cpu "
             "model_quantization_config_kwargs selective_checkpointing large_head_attention flash_attn_d512 "
             "sdpa_varlen tiled_mlp_num_shards tiled_mlp_use_original_mlp torch_compile_options fp32_norm_classes"),
    *all_listed("affects how experts are computed, not results",
             "experts_implementation use_scattermoe use_sonicmoe llama4_linearized_experts"),
    *all_listed("Axolotl does not read it",
             "gptq_disable_exllama gptq_groupsize gptq_model_v1 adam_eps eta_min sample_packing_seq_len_multiplier "
             "base_model_ignore_patterns full_finetune context_parapllel_size test_value"),
    listed("fp8", None, "the products of training are computed in 16 bits here, more exactly"),
    *all_listed("rows beyond the vocabulary are never used", "resize_token_embeddings_to_32x"),
    *all_listed("surefoot does not have this tracker; the log is in the run folder",
             "use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace "
             "swanlab_log_model swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
             "comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
             "comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port"),
    *all_listed("is for multi-process launchers; surefoot starts its own processes",
             "ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters local_rank "
             "world_size accelerator_config fsdp_version device device_map"),
    *all_listed("checkpoints are safetensors in the run folder and can be resumed from",
             "save_safetensors save_only_model save_first_step hub_strategy tokenizer_save_jinja_files merge_lora "
             "metric_for_best_model greater_is_better merge_method fsdp_final_state_dict_type"),
    *all_listed("is set by the tracker's own environment variables",
             "wandb_entity wandb_watch wandb_log_model wandb_run_id mlflow_tracking_uri mlflow_run_name "
             "hf_mlflow_log_artifacts trackio_run_name trackio_space_id"),
    *all_listed("surefoot's guard stops at non-finite values; the log shows the rest",
             "loss_watchdog_threshold loss_watchdog_patience profiler_steps profiler_steps_start debug"),
    *all_listed("applies to generation; surefoot's samples are greedy",
             "eval_table_size eval_max_new_tokens generation_temperature generation_top_p generation_top_k "
             "generation_prompt_ratio generation_do_sample gradio_title gradio_share gradio_server_name "
             "gradio_server_port gradio_max_new_tokens gradio_temperature"),
    *all_listed("rows of new tokens are drawn around the mean of the others", "mean_resizing_embeddings"),
    *all_listed("frozen weights keep their type here", "embeddings_skip_upcast"),
    *all_listed("an adapter's weights are kept in fp32", "peft_autocast_adapter_dtype"),
    *all_listed("answers are found by the template", "role_boundaries"),
    *all_listed("surefoot evaluates the loss", "eval_causal_lm_metrics"),
    *all_listed("Axolotl counts them itself", "total_supervised_tokens"),
    *(row for setting, names_of in _PARTS.items() for row in all_listed(f"belongs to {setting}", names_of)),
    *METHOD_ROWS,
    *(row for row in TRAINER_ROWS if row.name in _OF_THE_TRAINER),
    joint("fsdp_config", None, ("parallel.offload", "gradient_checkpointing"), "translated key by key",
          type=file_or_group, back=back.sharding),
    joint("qat", None, ("precision.qat", "precision.qat_group_size", "precision.qat_after"),
          "int4 weights with int8 activations; NVFP4 or MXFP4 of both", type=group, back=back.qat),
    *_refused("belongs to a training method that surefoot does not support",
              "process_reward_model relora relora_prune_ratio gptq quantization trainer_cls lisa_n_layers "
              "lisa_step_interval jagged_restart_steps use_pose "
              "ebft do_bench_eval diffusion llmcompressor nemo_gym_enabled hatchery"),
    *_refused("surefoot loads no base in NVFP4 and computes experts in 16 bits",
              "use_dsv4_kernels use_glm_dsa_kernels dsv4_fp4_grouped_mode nvfp4_merge_aware"),
    *_refused("surefoot configures this with parallel.engine", "deepcompile"),
    *(joint(name, 1, ("batch.size", "parallel.nproc"), "processes that divide one batch") for name in SAME_BATCH),
    *(joint(name, 1, ("batch.size", "parallel.nproc"), "processes with a batch each") for name in OWN_BATCH),
    joint("use_ray", False, ("parallel.nproc",)),
    joint("ray_num_workers", 1, ("parallel.nproc",)),
    *_refused("Axolotl no longer has it", "max_packed_sequence_len torchdistx_path"),
    refused("pretrain_multipack_attn", True, "the texts of a row do not see one another here"),
    *_refused("surefoot joins no texts; sample_packing fills rows", "pretraining_sample_concatenation"),
    *_refused("surefoot adapts what lora_target_modules name", "lora_exclude_modules", fix="name the others"),
    *_refused("pictures are read by the model's own processor", "processor_kwargs image_size image_resize_algorithm"),
    refused("default_system_message", None, "changes Axolotl's templates", "write system into surefoot's sources"),
    refused("dataset_shard_idx", None, "selects a part of the data", "use max_samples in surefoot's config"),
    *_refused("surefoot has no such setting",
              "base_model_config overrides_of_model_config overrides_of_model_kwargs rope_scaling "
              "lora_rank_pattern lora_alpha_pattern peft peft_layers_to_transform peft_layers_pattern "
              "peft_layer_replication peft_trainable_token_indices "
              "added_tokens_overrides shrink_embeddings shuffle_before_merging_datasets "
              "push_dataset_to_hub dataloader_drop_last max_prompt_len eval_sequence_len "
              "auto_find_batch_size batch_flattening sage_attention s2_attention "
              "optim_args optim_target_modules lr_scheduler_kwargs lr_quadratic_warmup cosine_constant_lr_ratio "
              "lr_div_factor adam_epsilon2 adam_beta3 "
              "fix_untrained_tokens use_comet hub_revision dynamic_checkpoint scaling_softmax use_onebitllms "
              "peft_ensure_weight_tying"),
)  # fmt: skip
ROWS: Mapping[str, Row] = by_name(*_ROWS)
PARTS = {"nemo_gym_": "nemo_gym_enabled", "relora_": "relora", "expert_parallel_": "expert_parallel_size"}
ALIASES: Mapping[str, str] = {
    f"{BLOCK}vllm_importance_sampling_cap": f"{BLOCK}vllm_importance_sampling_clip_max",
    "evaluation_strategy": "eval_strategy",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "model_revision": "revision_of_model",
    "dpo_beta": "rl_beta",
    "dora": "peft_use_dora",
    "sequence_parallel_degree": "context_parallel_size",
}
