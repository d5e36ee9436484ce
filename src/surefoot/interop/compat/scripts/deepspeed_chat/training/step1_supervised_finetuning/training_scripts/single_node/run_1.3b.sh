#!/usr/bin/env bash
# Step 1 on OPT-1.3b:  run_1.3b.sh [OUTPUT [ZERO_STAGE [FLAGS…]]]      defaults: ./output 2
# environment: MODEL (facebook/opt-1.3b), DATA_PATH (Dahoas/rm-static), NUM_GPUS (all). FLAGS go before those below.

source "$(dirname "${BASH_SOURCE[0]}")/../../../launch.sh"
launch "${1:-./output}" \
    --data_path ${DATA_PATH:-Dahoas/rm-static} \
    --data_split 2,4,4 \
    --model_name_or_path "${MODEL:-facebook/opt-1.3b}" \
    --per_device_train_batch_size 8 \
    --per_device_eval_batch_size 8 \
    --max_seq_len 512 \
    --learning_rate 9.65e-6 \
    --weight_decay 0. \
    --num_train_epochs 16 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --seed 1234 \
    --zero_stage "${2:-2}" \
    --deepspeed \
    "${@:3}"
