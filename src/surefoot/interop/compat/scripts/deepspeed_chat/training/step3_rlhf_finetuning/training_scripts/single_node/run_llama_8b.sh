#!/usr/bin/env bash
# Step 3, PPO:  run_llama_8b.sh ACTOR CRITIC [ACTOR_ZERO [CRITIC_ZERO [OUTPUT [FLAGS…]]]]
# defaults: 3 3 ./output_llama_8b_rlhf
# environment: DATA_PATH (Dahoas/rm-static), NUM_GPUS (all). The policy is written to OUTPUT/actor.
# Below stage 3 its moving average is kept as well (--enable_ema).

source "$(dirname "${BASH_SOURCE[0]}")/../../../launch.sh"
launch "${5:-./output_llama_8b_rlhf}" \
    --data_path ${DATA_PATH:-Dahoas/rm-static} \
    --data_split 2,4,4 \
    --actor_model_name_or_path "${1:?name the folder of step 1}" \
    --critic_model_name_or_path "${2:?name the folder of step 2}" \
    --num_padding_at_beginning 0 \
    --per_device_generation_batch_size 1 \
    --per_device_training_batch_size 1 \
    --generation_batches 1 \
    --ppo_epochs 1 \
    --max_answer_seq_len 256 \
    --max_prompt_seq_len 256 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 5e-6 \
    --num_train_epochs 1 \
    --lr_scheduler_type cosine \
    --gradient_accumulation_steps 1 \
    --actor_dropout 0.0 \
    --num_warmup_steps 100 \
    --seed 1234 \
    --dtype bf16 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --enable_hybrid_engine \
    --actor_zero_stage "${3:-3}" \
    --critic_zero_stage "${4:-3}" \
    $(average "${3:-3}" "${4:-3}") \
    --deepspeed \
    "${@:6}"
