#!/usr/bin/env bash
# Step 2 on OPT-350m:  run_350m.sh [OUTPUT [ZERO_STAGE [FLAGS…]]]      defaults: ./output 0
# environment: MODEL (facebook/opt-350m), DATA_PATH (Dahoas/rm-static), NUM_GPUS (all).

source "$(dirname "${BASH_SOURCE[0]}")/../../../launch.sh"
launch "${1:-./output}" \
    --data_path ${DATA_PATH:-Dahoas/rm-static} \
    --data_split 2,4,4 \
    --model_name_or_path "${MODEL:-facebook/opt-350m}" \
    --num_padding_at_beginning 1 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --max_seq_len 512 \
    --learning_rate 5e-5 \
    --weight_decay 0.1 \
    --dropout 0.0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --seed 1234 \
    --zero_stage "${2:-0}" \
    --deepspeed \
    "${@:3}"
