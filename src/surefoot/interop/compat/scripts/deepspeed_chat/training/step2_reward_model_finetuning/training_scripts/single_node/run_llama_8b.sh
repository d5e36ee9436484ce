#!/usr/bin/env bash
# Step 2 on Llama-3.1-8B:  run_llama_8b.sh [OUTPUT [ZERO_STAGE [FLAGS…]]]      defaults: ./output_llama_8b_reward 3
# environment: MODEL (meta-llama/Meta-Llama-3.1-8B), DATA_PATH (Dahoas/rm-static), NUM_GPUS (all).

source "$(dirname "${BASH_SOURCE[0]}")/../../../launch.sh"
launch "${1:-./output_llama_8b_reward}" \
    --data_path ${DATA_PATH:-Dahoas/rm-static} \
    --data_split 2,4,4 \
    --model_name_or_path "${MODEL:-meta-llama/Meta-Llama-3.1-8B}" \
    --num_padding_at_beginning 0 \
    --per_device_train_batch_size 2 \
    --per_device_eval_batch_size 2 \
    --max_seq_len 512 \
    --learning_rate 5e-6 \
    --weight_decay 0.1 \
    --dropout 0.0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 4 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --seed 1234 \
    --dtype bf16 \
    --gradient_checkpointing \
    --zero_stage "${2:-3}" \
    --deepspeed \
    "${@:3}"
