"""Rows for LLaMA-Factory's own settings, grouped as in its documentation; Trainer's are in `interop.trainer_rows`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.families.other_templates import PREFIX
from surefoot.interop import trainer
from surefoot.interop.adapters import STARTED, module_names, ratio_back
from surefoot.interop.backward import (
    differs,
    equals,
    held_out,
    length,
    longest,
    never,
    reverse,
    share_of_warmup,
    true_if,
    unless,
)
from surefoot.interop.llamafactory import back, freeze
from surefoot.interop.llamafactory.data import STAGES, UNTHINKING
from surefoot.interop.settings import (
    OF_THE_HUB,
    OWN_KERNELS,
    Refusal,
    Row,
    all_listed,
    carried,
    group,
    hub_revision,
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
from surefoot.method_facts.losses import NO_REFERENCE

_GENERATING = "applies to generation; surefoot generate and chat have flags for it"
_PREPROCESSING = "data is prepared once and cached by content"
_EXPORT = "is a setting of `llamafactory-cli export`"
_SWANLAB = "SwanLab is not one of surefoot's trackers"
_VLLM = "applies to generation with vLLM"
_EVALUATION = "is a setting of `llamafactory-cli eval`"
_MEDIA = "image paths are relative to the data file"
_FILM = "is for video and audio; surefoot trains on text and images"
_OF_FILES = "set it in the model's preprocessor_config.json, or leave it out"
_ATTENTION = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def _attention_word(value: Any) -> str:
    """Read flash_attn; very old configs use true or false."""
    return {True: "fa2", False: "disabled"}[value] if isinstance(value, bool) else str(value)


MEGATRON = (  # read with USE_MCA alone
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
    "sequence_parallel", "use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce",
    "bias_activation_fusion", "apply_rope_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type",
    "recompute_granularity", "export_hf_on_finish", "use_packed_sequences",
)  # fmt: skip
PARTS = {"apollo_": "use_apollo", "oft_": "finetuning_type: oft"}
MODEL = (
    carried("model_name_or_path", None, "model.path", type=text, required=OF_THE_HUB),
    joint("adapter_name_or_path", None, ("adapter.initial",),
          "one folder, whose adapter_config.json decides rank, alpha, dropout and modules", type=text),
    listed("adapter_folder", None, "is refused with adapter_name_or_path, which then names the folder itself"),
    listed("cache_dir", None, "surefoot uses Hugging Face's cache; HF_HOME moves it"),
    listed("use_fast_tokenizer", True, "surefoot uses the fast tokenizer"),
    joint("resize_vocab", False, ("tokenizer.add",), "with new tokens, whose rows are added in any case", back=never),
    refused("split_special_tokens", False, "surefoot treats special tokens in the data as text or refuses them"),
    joint("add_tokens", None, ("tokenizer.add", "tokenizer.add_special"), type=names,
          back=lambda ours: ",".join(ours["tokenizer.add"]) or None),
    joint("add_special_tokens", None, ("tokenizer.add", "tokenizer.add_special"),
          "control tokens where the template writes them", type=names,
          back=lambda ours: ",".join(ours["tokenizer.add_special"]) or None),
    refused("new_special_tokens_config", None, "surefoot draws rows of new tokens around the mean of the others",
            "name the tokens in add_special_tokens"),
    listed("init_special_tokens", "noise_init", "rows of new tokens are drawn around the mean of the others"),
    carried("model_revision", "main", "model.revision", hub_revision, type=text),
    listed("low_cpu_mem_usage", True, "weights are loaded one at a time"),
    refused("rope_scaling", None, "surefoot keeps the model's position encoding", "set it in the model's config.json"),
    carried("flash_attn", "auto", "attention.implementation", one_of(_ATTENTION), type=_attention_word,
            back=reverse("attention.implementation", _ATTENTION)),
    refused("shift_attn", False, "surefoot keeps the model's attention"),
    refused("mixture_of_depths", None, "surefoot does not change a model's layers"),
    *all_listed(OWN_KERNELS, use_unsloth=False, use_unsloth_gc=False, enable_liger_kernel=False, use_v1_kernels=False),
    refused("moe_aux_loss_coef", None, "surefoot's loss has no router term"),
    carried("disable_gradient_checkpointing", False, "gradient_checkpointing", lambda off: switch(not off),
            back=equals("gradient_checkpointing", "off")),
    listed("use_reentrant_gc", True, "all variants give the same gradients"),
    refused("upcast_layernorm", False, "a frozen base has one dtype", "use precision: {base: fp32}, or leave it out"),
    listed("upcast_lmhead_output", False, "the loss is computed in fp32"),
    joint("train_from_scratch", False, ("model.weights",), "finetuning_type: full",
          back=true_if("model.weights", "random")),
    listed("infer_backend", "huggingface", _GENERATING),
    listed("offload_folder", "offload", "surefoot offloads no weights to disk"),
    *all_listed(_GENERATING, use_kv_cache=True, infer_dtype="auto"),
    listed("hf_hub_token", None, "surefoot uses HF_TOKEN or `hf auth login`", secret=True),
    listed("ms_hub_token", None, "surefoot does not support ModelScope", secret=True),
    listed("om_hub_token", None, "surefoot does not support Modelers", secret=True),
    listed("print_param_status", False, "`surefoot plan` shows which parameters train"),
    listed("trust_remote_code", False, "surefoot runs no code from a model or dataset repository"),
    joint("quantization_method", "bnb", ("precision.base",), type=text, back=never),
    joint("quantization_bit", None, ("precision.base",), "4 with nf4, or 8", type=whole,
          back=reverse("precision.base", {4: "nf4", 8: "int8"})),
    joint("quantization_type", "nf4", ("precision.base",), type=text, back=never),
    joint("double_quantization", True, ("precision.base",)),
    listed("quantization_device_map", None, "the model is on one device"),
    joint("image_max_pixels", 768 * 768, ("data.max_pixels",), "if given, or with a template of a Qwen-VL"),
    listed("image_min_pixels", 32 * 32, "the model's processor enlarges small images"),
    refused("image_do_pan_and_scan", False, "the processor's files decide", _OF_FILES),
    refused("crop_to_patches", False, "the processor's files decide", _OF_FILES),
    *all_listed(_FILM, video_max_pixels=256 * 256, video_min_pixels=16 * 16, video_fps=2.0, video_maxlen=128),
    *all_listed(_FILM, use_audio_in_video=False, audio_sampling_rate=16000),
    *all_listed(_EXPORT, export_dir=None, export_size=5, export_device="cpu", export_quantization_bit=None),
    *all_listed(_EXPORT, export_quantization_dataset=None, export_quantization_nsamples=128),
    *all_listed(_EXPORT, export_quantization_maxlen=1024, export_legacy_format=False, export_hub_model_id=None),
    *all_listed(_VLLM, vllm_maxlen=4096, vllm_gpu_util=0.7, vllm_enforce_eager=False, vllm_max_lora_rank=32),
    *all_listed(_VLLM, vllm_config=None),
)  # fmt: skip

DATA = (
    joint("template", None, ("data.template", "bos.prepend"), "see the table below; null: the tokenizer's own",
          type=text, back=back.template),
    joint("dataset", None, ("data.train",), "names in dataset_dir/dataset_info.json", type=names,
          back=back.train_names),
    joint("eval_dataset", None, ("data.eval",), "names in dataset_dir/dataset_info.json", type=names,
          back=back.held_out_names),
    joint("dataset_dir", "data", ("data.train", "data.eval"), "ONLINE: names are hub datasets", type=text,
          back=back.folder),
    listed("media_dir", None, _MEDIA),
    joint("cutoff_len", 2048, ("data.max_length",), "surefoot's auto is also 2048 if the model has as many positions",
          back=longest),
    joint("train_on_prompt", False, ("data.train_on",), back=equals("data.train_on", "everything")),
    joint("mask_history", False, ("data.train_on",), back=equals("data.train_on", "last")),
    joint("streaming", False, ("data.train",), "hub datasets only"),
    listed("buffer_size", 16384, "all records of a stream are shuffled together"),
    joint("mix_strategy", "concat", ("data.train",), type=text, back=back.mix),
    joint("interleave_probs", None, ("data.train",), "weights of the sources", type=names, back=back.shares),
    *all_listed(_PREPROCESSING, overwrite_cache=False, preprocessing_batch_size=1000, preprocessing_num_workers=None),
    joint("max_samples", None, ("data.max_samples", "data.eval"), "per dataset, for training and evaluation",
          type=whole, back=back.of_all("max_samples")),
    listed("eval_num_beams", None, _GENERATING),
    refused("ignore_pad_token_for_loss", True, "padding never carries loss"),
    joint("val_size", 0.0, ("data.eval",), "a fraction below 1, or a count", back=held_out),
    refused("eval_on_each_dataset", False, "surefoot evaluates on all datasets together"),
    joint("packing", None, ("batch.row_tokens",), "only with neat_packing", back=never),
    joint("neat_packing", False, ("batch.row_tokens",), "stage sft: rows of cutoff_len",
          back=differs("batch.row_tokens", None)),
    refused("tool_format", None, "the template decides the format of tools"),
    joint("default_system", None, ("data.train",), "of conversations without one", type=text,
          back=back.of_all("system")),
    joint("enable_thinking", True, ("data.template",), "qwen3 only",
          null=Refusal("null keeps thoughts and adds no empty ones, as surefoot never does", "use true or false"),
          back=differs("data.template", PREFIX + UNTHINKING)),
    refused("preserve_thinking", False, "the template decides what is kept of earlier turns"),
    joint("tokenized_path", None, (), "refused without dataset", type=text),
    listed("data_shared_file_system", False, "surefoot starts its own processes"),
)  # fmt: skip

FINETUNING = (
    refused("pure_bf16", False, "training in 16-bit weights loses small updates", "use bf16: true"),
    joint("stage", "sft", ("stage",), "pt, sft, rm, ppo, dpo, kto", back=reverse("stage", STAGES)),
    joint("finetuning_type", "lora", ("adapter.kind", "model.trained"), "lora, full or freeze", back=freeze.kind),
    joint("use_llama_pro", False, ("model.trained",), "finetuning_type: freeze", back=freeze.said("use_llama_pro")),
    refused("use_adam_mini", False, "surefoot has no Adam-mini", "use optim: adamw_8bit"),
    refused("use_mca", False, "surefoot has no Megatron"),
    refused("use_megatron_bridge", False, "surefoot has no Megatron"),
    *(refused(name, None, "surefoot has no Megatron") for name in MEGATRON),
    refused("use_hyper_parallel", False, "surefoot configures this with parallel.engine"),
    *all_listed("is for several processes", hyper_parallel_args=None, hyper_parallel_cp_size=1),
    joint("use_muon", False, ("optim.name",), back=equals("optim.name", "muon")),
    joint("use_dft_loss", False, ("sft.loss",), OF_TOKENS, back=true_if("sft.loss", "dft")),
    joint("use_asft_loss", False, ("sft.loss",), OF_TOKENS, back=true_if("sft.loss", "asft")),
    joint("asft_alpha", 0.1, ("sft.kl",)),
    joint("use_eaft_loss", False, ("sft.loss",), OF_TOKENS, back=true_if("sft.loss", "eaft")),
    joint("eaft_alpha", 1.0, ("sft.alpha",)),
    joint("freeze_vision_tower", True, ("vision.tower",), "all of it, or with LoRA an adapter",
          back=equals("vision.tower", "frozen")),
    joint("freeze_multi_modal_projector", True, ("vision.projector",), "only with finetuning_type: full",
          back=equals("vision.projector", "frozen")),
    refused("freeze_language_model", False, "surefoot trains the language model or an adapter on it"),
    listed("compute_accuracy", False, "token accuracy is always measured"),
    joint("disable_shuffling", False, ("data.order",), "examples in the order of the files",
          back=true_if("data.order", "file")),
    joint("early_stopping_steps", None, ("early_stopping.patience",), "needs evaluation data", type=whole),
    listed("plot_loss", False, "the curves are always drawn"),
    listed("include_effective_tokens_per_second", False, "tokens per second are always logged"),
    joint("additional_target", None, ("adapter.modules_to_save",), type=module_names,
          back=lambda ours: ",".join(ours["adapter.modules_to_save"] or ()) or None),
    joint("lora_alpha", None, ("adapter.alpha",), "default: twice lora_rank", type=whole),
    joint("lora_dropout", 0.0, ("adapter.dropout",)),
    joint("lora_rank", 8, ("adapter.rank",)),
    joint("lora_target", "all", ("adapter.targets",), type=module_names, back=back.targets),
    joint("loraplus_lr_ratio", None, ("optim.rates",), "LoRA+", type=number, back=ratio_back),
    listed("loraplus_lr_embedding", 1e-6, "is for LoRA on embeddings, which surefoot does not have"),
    joint("use_rslora", False, ("adapter.rslora",)),
    joint("use_dora", False, ("adapter.kind",), back=equals("adapter.kind", "dora")),
    joint("pissa_init", False, ("adapter.start",), STARTED, back=equals("adapter.start", "pissa")),
    joint("pissa_iter", 16, ("adapter.start_iterations",), "-1: the exact decomposition",
          back=lambda ours: ours["adapter.start_iterations"] or -1),
    joint("pissa_convert", False, (), "always, for the run folder"),
    joint("create_new_adapter", False, (), "refused with adapter_name_or_path; export merges an adapter"),
    joint("freeze_trainable_layers", 2, ("model.trained",),
          "finetuning_type: freeze; without config.json the plan counts from the last",
          back=freeze.said("freeze_trainable_layers")),
    joint("freeze_trainable_modules", "all", ("model.trained",), "finetuning_type: freeze", type=names,
          back=freeze.said("freeze_trainable_modules")),
    joint("freeze_extra_modules", None, ("model.trained",), "finetuning_type: freeze", type=names,
          back=freeze.said("freeze_extra_modules")),
    joint("pref_beta", 0.1, ("alignment.beta",), "stages dpo and kto"),
    joint("pref_ftx", 0.0, ("alignment.sft",), "stage dpo"),
    joint("pref_bco_weight", 0.0, (), "refused above 0"),
    joint("pref_loss", "sigmoid", ("alignment.loss",), "sigmoid, hinge, ipo, orpo, simpo"),
    joint("dpo_label_smoothing", 0.0, ("alignment.label_smoothing",), "sigmoid only"),
    joint("kto_chosen_weight", 1.0, ("alignment.good",)),
    joint("kto_rejected_weight", 1.0, ("alignment.bad",)),
    joint("simpo_gamma", 0.5, ("alignment.margin",), "pref_loss: simpo"),
    joint("ppo_buffer_size", 1, ("ppo.rollout_batches",)),
    joint("ppo_epochs", 4, ("ppo.epochs",)),
    joint("ppo_score_norm", False, (), "refused"),
    joint("ppo_target", 6.0, ("ppo.kl_target",)),
    joint("ppo_whiten_rewards", False, (), "refused; advantages are whitened"),
    joint("ref_model", None, ("alignment.reference",), "stages dpo and kto", type=text,
          back=unless("alignment.reference", "auto", "adapter-off", "model", "cached", NO_REFERENCE)),
    joint("ref_model_adapters", None, (), "refused: merge them first", type=text),
    joint("ref_model_quantization_bit", None, (), "refused", type=whole),
    joint("reward_model", None, ("ppo.reward",), type=text, back=back.reward_model),
    joint("reward_model_adapters", None, (), "refused: merge them first", type=text),
    joint("reward_model_quantization_bit", None, (), "refused", type=whole),
    joint("reward_model_type", "lora", ("ppo.reward",), "lora or full; api is refused", back=back.reward_type),
    joint("ld_alpha", None, (), "refused", type=number),
    refused("use_galore", False, "surefoot has no GaLore", "use adapter: lora, or optim: adafactor"),
    *all_listed("belongs to use_galore", galore_target="all", galore_rank=16, galore_update_interval=200),
    *all_listed("belongs to use_galore", galore_scale=2.0, galore_proj_type="std", galore_layerwise=False),
    refused("use_apollo", False, "surefoot has no APOLLO", "use adapter: lora, or optim: adafactor"),
    joint("use_kt", False, ("adapter.experts", "adapter.router"), "LoRA over experts in bf16", back=never),
    joint("kt_config", None, (), "of experts in bf16, only where and how fast they are computed", type=group),
    *(joint(name, None, (), "refused with use_kt: other numbers", type=text)
      for name in ("kt_weight_path", "kt_non_expert_weight_path", "kt_expert_checkpoint_path")),
    joint("kt_use_lora_experts", None, (), "refused with use_kt: further experts", type=truth),
    *all_listed("belongs to use_kt", kt_cpu_activation=None, kt_lora_expert_num=None,
                kt_lora_expert_intermediate_size=None),
    refused("use_badam", False, "surefoot has no BAdam", "use adapter: lora, or optim: adafactor"),
    *all_listed("belongs to use_badam", badam_mode="layer", badam_start_block=None, badam_switch_mode="ascending"),
    *all_listed("belongs to use_badam", badam_switch_interval=50, badam_update_ratio=0.05, badam_mask_mode="adjacent"),
    *all_listed("belongs to use_badam", badam_verbose=0),
    refused("use_swanlab", False, _SWANLAB, "use report_to with tensorboard, wandb, mlflow or trackio"),
    *all_listed(_SWANLAB, swanlab_project="llamafactory", swanlab_workspace=None, swanlab_run_name=None),
    *all_listed(_SWANLAB, swanlab_mode="cloud"),
    listed("swanlab_api_key", None, _SWANLAB, secret=True),
    listed("swanlab_logdir", None, _SWANLAB),
    listed("swanlab_lark_webhook_url", None, _SWANLAB, secret=True),
    listed("swanlab_lark_secret", None, _SWANLAB, secret=True),
    joint("use_bos_zero_training", False, ("bos.prepend", "bos.scale"), "from the fork that scales the BOS embedding",
          back=differs("bos.scale", 1)),
    joint("bos_scaling_factor", 0.1, ("bos.scale",), "from the fork; needs use_bos_zero_training",
          back=unless("bos.scale", 1)),
)  # fmt: skip

GENERATING = (
    listed("do_sample", True, _GENERATING),
    joint("temperature", 0.95, ("ppo.temperature",), "stage ppo; otherwise applies to generation"),
    joint("top_p", 0.7, ("ppo.top_p",), "stage ppo; otherwise applies to generation"),
    joint("top_k", 50, ("ppo.top_p",), "stage ppo; otherwise applies to generation", back=lambda ours: 0),
    *all_listed(_GENERATING, num_beams=1, max_length=1024),
    joint("max_new_tokens", 1024, ("ppo.max_new_tokens",), "stage ppo; otherwise applies to generation"),
    *all_listed(_GENERATING, repetition_penalty=1.0, length_penalty=1.0, skip_special_tokens=True),
)

EVALUATION = (
    *all_listed(_EVALUATION, task=None, task_dir="evaluation", batch_size=4, lang="en", n_shot=5, save_dir=None),
    *all_listed(_EVALUATION, download_mode="reuse_dataset_if_exists"),
)

PROCESSES = (
    *all_listed("surefoot starts its own processes", ray_num_workers=1, ray_init_kwargs=None, master_addr=None),
    *all_listed("surefoot starts its own processes", master_port=None),
    refused("fp8", False, "surefoot computes in fp32, bf16 or fp16", "use bf16: true"),
    *all_listed("belongs to fp8", fp8_backend="auto", fp8_enable_fsdp_float8_all_gather=False),
)

GROUPS: dict[str, tuple[Row, ...]] = {
    "Model": MODEL,
    "Data": DATA,
    "Fine-tuning": FINETUNING,
    "Answering": GENERATING,
    "Evaluation": EVALUATION,
    "Processes and types": PROCESSES,
    "Training, as in transformers": trainer.ROWS,
}
ROWS = {row.name: row for group in reversed(GROUPS.values()) for row in group}
# LLaMA-Factory runs with transformers 4 as well, where a share of warm-up has its own setting.
ROWS |= {
    "gradient_checkpointing": listed("gradient_checkpointing", False, "disable_gradient_checkpointing decides"),
    "warmup_ratio": replace(ROWS["warmup_ratio"], back=share_of_warmup),
    "warmup_steps": replace(ROWS["warmup_steps"], back=length("optim.warmup", "steps")),
}
