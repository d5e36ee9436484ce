#!/usr/bin/env bash
# RLHF from nothing, on a laptop: SFT -> PPO with a reward that is a function, on the quickstart's model and data.
#
#   examples/rlhf_quickstart.sh                    # writes ./rlhf-quickstart, a few minutes on two cores
#   examples/rlhf_quickstart.sh out seed=2         # what follows goes to both runs
#
# No network, no downloads. The supervised policy guesses one of eight rooms; PPO learns the right ones from the reward
# alone. Called again, it keeps finished runs and goes on with interrupted ones. docs/ppo.md explains the numbers.
set -euo pipefail

OUT=${1:-rlhf-quickstart}
HERE=$(cd "$(dirname "$0")" && pwd)
BASE=$(python -c "from surefoot.commands.quickstart.world import base_folder; print(base_folder())")
COMMON=("${@:2}" --resume)

# 1. Questions, and answers whose rooms were drawn by lot.
python "$HERE/museum.py" data "$OUT/data"

# 2. How an answer sounds. Look at: eval_loss does not fall below ln 8 / 7 tokens: nothing about rooms can be learned.
surefoot train "$HERE/museum-sft.yaml" model="$BASE" data.train="$OUT/data/sft.json" \
  output="$OUT/sft" "${COMMON[@]}"

# 3. Which answer is right. Look at: reward rises from 0.125 to about 1; kl stays near ln 8 = 2.08 nats, what it costs to
#    know one room in eight; eval_reward, on things that no prompt names, rises with it.
surefoot train "$HERE/museum-ppo.yaml" model="$OUT/sft" data.train="$OUT/data/prompts.json" \
  data.eval="$OUT/data/held-out.json" ppo.reward="$HERE/museum.py:right_room" output="$OUT/ppo" "${COMMON[@]}"

# 4. The mean reward of drawn answers, before and after; exit 1 unless it rose by two standard deviations.
python "$HERE/museum.py" earns "$OUT/sft" "$OUT/ppo" "$OUT/data"
