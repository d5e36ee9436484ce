#!/usr/bin/env bash
# RLHF in three steps and the short way beside it, on one preference file: SFT -> reward model -> PPO, and SFT -> DPO.
#
#   examples/rlhf.sh meta-llama/Llama-3.1-8B data/train.json data/eval.json rlhf-llama
#   examples/rlhf.sh facebook/opt-350m data/train.json data/eval.json rlhf-opt data.max_length=512
#
# Records are {prompt, chosen, rejected}: texts, or dialogues of "\n\nHuman: ... \n\nAssistant:". What follows the fourth
# argument goes to every run as it is; ANSWER=64 in the environment makes PPO's answers at most so
# long. Called again, it keeps finished runs and goes on with interrupted ones, at the step and bit for bit. docs/rlhf.md walks through it.
set -euo pipefail

MODEL=${1:?a model: folder or hub id}
TRAIN=${2:?preference records to train on}
EVAL=${3:?preference records to measure with}
OUT=${4:-rlhf}
ANSWER=${ANSWER:-256}
COMMON=(data.train.path="$TRAIN" data.eval="$EVAL" "${@:5}" --resume)
RECIPES=$(dirname "$0")/../recipes

# 1. The better answers, as in any supervised run. The run publishes a whole model, on which the others build.
#    Look at: eval_loss falls; the audit says how the records were read.
surefoot train "$RECIPES/sft-llama3-8b-pairs-lora.yaml" model="$MODEL" output="$OUT/sft" "${COMMON[@]}"

# 2. A score that prefers the better answers. Trained on one share of the pairs, measured on pairs it never saw.
#    Look at: accuracy above 0.6, else PPO has nothing to go by; reward-measured/calibration.png.
surefoot train "$RECIPES/reward-llama3-8b-lora.yaml" model="$OUT/sft" output="$OUT/reward" "${COMMON[@]}"
surefoot evaluate reward "$OUT/reward" "$EVAL" --out "$OUT/reward-measured"

# 3. PPO: the model answers prompts, the score says how well, and KL keeps it near where it began.
#    Look at: reward rises, kl stays under its bound, ratio stays around 1.
PPO=(ppo.reward="$OUT/reward" ppo.max_new_tokens="$ANSWER")
surefoot train "$RECIPES/ppo-llama3-8b-lora.yaml" model="$OUT/sft" "${PPO[@]}" output="$OUT/ppo" "${COMMON[@]}"

# 4. The short way: the same pairs, no reward model and no rollouts.
#    Look at: reward_accuracy and reward_margin rise from 0.5 and 0.
surefoot train "$RECIPES/dpo-llama3-8b-lora.yaml" model="$OUT/sft" output="$OUT/dpo" "${COMMON[@]}"

# 5. Side by side.
surefoot generate "$OUT/sft" --prompt "How do I keep a basil plant alive?"
surefoot generate "$OUT/ppo" --prompt "How do I keep a basil plant alive?"
surefoot generate "$OUT/dpo" --prompt "How do I keep a basil plant alive?"
