#!/usr/bin/env bash
# DoRA on Llama-3.1-8B with the commonsense mixture:  llama3_8B_DoRA.sh [RANK [ALPHA [OUTPUT [GPU]]]]
set -euo pipefail

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
    cat <<'END'
usage: llama3_8B_DoRA.sh [RANK [ALPHA [OUTPUT [GPU]]]]      defaults: 32 64 ./output, every GPU

environment: BASE_MODEL (meta-llama/Llama-3.1-8B), DATA_PATH (./commonsense_170k.json), BATCH_SIZE (128),
MICRO_BATCH_SIZE (2), EPOCHS (3), VAL_SET_SIZE (120). All other flags: finetune.py --help
END
    exit 0
fi

rank="${1:-32}" alpha="${2:-64}" output="${3:-./output}"
if [ -n "${4:-}" ]; then export CUDA_VISIBLE_DEVICES="$4"; fi

# Not through `accelerate launch`: of one process it changes nothing, and its traceback would hide what is wrong.
exec "$(dirname "$0")/finetune.py" \
    --base_model "${BASE_MODEL:-meta-llama/Llama-3.1-8B}" \
    --data_path "${DATA_PATH:-./commonsense_170k.json}" \
    --output_dir "$output" \
    --adapter_name dora \
    --lora_r "$rank" \
    --lora_alpha "$alpha" \
    --target_modules q_proj k_proj v_proj o_proj up_proj down_proj gate_proj \
    --batch_size "${BATCH_SIZE:-128}" \
    --per_device_train_batch_size "${MICRO_BATCH_SIZE:-2}" \
    --num_epochs "${EPOCHS:-3}" \
    --learning_rate 3e-5 \
    --val_set_size "${VAL_SET_SIZE:-120}" \
    --bf16 True \
    --attn_implementation eager \
    --disable_cudnn_sdpa True \
    --enable_torch_compile False \
    --seed 42
