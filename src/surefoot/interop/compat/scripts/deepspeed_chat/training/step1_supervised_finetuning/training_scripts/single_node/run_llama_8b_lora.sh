#!/usr/bin/env bash
# Step 1 on Llama-3.1-8B with LoRA:  run_llama_8b_lora.sh [OUTPUT [ZERO_STAGE [FLAGS…]]]
# defaults: ./output_llama_8b_sft_lora 2
# environment: MODEL (meta-llama/Meta-Llama-3.1-8B), DATA_PATH (Dahoas/rm-static), NUM_GPUS (all).

source "$(dirname "${BASH_SOURCE[0]}")/../../../launch.sh"
launch "${1:-./output_llama_8b_sft_lora}" \
    --data_path ${DATA_PATH:-Dahoas/rm-static} \
    --data_split 2,4,4 \
    --model_name_or_path "${MODEL:-meta-llama/Meta-Llama-3.1-8B}" \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --max_seq_len 512 \
    --learning_rate 5e-4 \
    --lora_learning_rate 5e-4 \
    --lora_dim 128 \
    --lora_module_name model.layers. \
    --only_optimize_lora \
    --weight_decay 0. \
    --num_train_epochs 3 \
    --gradient_accumulation_steps 2 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --seed 1234 \
    --dtype bf16 \
    --gradient_checkpointing \
    --zero_stage "${2:-2}" \
    --deepspeed \
    "${@:3}"
