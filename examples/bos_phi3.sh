#!/usr/bin/env bash
# The BOS experiment from end to end: two LoRA runs on Phi-3 that differ in one number, measured, merged and compared.
#
#   examples/bos_phi3.sh                                          the real model and alpaca_en_demo.json, on one GPU
#   examples/bos_phi3.sh models/phi3 data/alpaca.json bos-phi3    your own folder or hub id, records and place
#   examples/bos_phi3.sh models/phi3 data/alpaca.json bos-phi3 duration='20 steps' precision=fp32
#
# What follows the third argument goes to both runs as it is. docs/bos.md shows what all this prints and
# draws. Called again, it keeps finished runs, goes on with interrupted ones and measures anew.
set -euo pipefail

MODEL=${1:-microsoft/Phi-3-mini-4k-instruct}
DATA=${2:-data/alpaca_en_demo.json} # records in a JSON list
OUT=${3:-bos-phi3}
SCALE=0.1
RECIPE=$(dirname "$0")/../recipes/sft-phi3-bos-lora.yaml

# 1. Every tenth record is held out, in a file of its own, so that it can be asked again later.
mkdir -p "$OUT"
python3 - "$DATA" "$OUT" <<'PYTHON'
import json, pathlib, sys
records = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
parts = {"heldout": records[::10], "train": [one for place, one in enumerate(records) if place % 10]}
for name, part in parts.items():
    pathlib.Path(sys.argv[2], name + ".json").write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")
PYTHON

# 2. Baseline and scaled run: the same data, order and seed, and BOS before every example. Only bos.scale differs.
#    Look at: "BOS <s>, exactly once" in both; the table of losses that `compare` prints; report.html of each run.
COMMON=(model="$MODEL" data.train="$OUT/train.json" data.eval="$OUT/heldout.json" bos.prepend=on "${@:4}")
surefoot train "$RECIPE" "${COMMON[@]}" bos.scale=1 output="$OUT/baseline" --resume
surefoot train "$RECIPE" "${COMMON[@]}" bos.scale=$SCALE output="$OUT/scaled" --resume
surefoot compare "$OUT/baseline" "$OUT/scaled"

# 3. The loss on what was held out, the base model beside each adapter.
#    Look at: "adapter", which is eval_loss in the run's eval_results.json; "base", which is equal in both.
surefoot evaluate loss "$OUT/baseline" "$OUT/heldout.json" --out "$OUT/loss-baseline"
surefoot evaluate loss "$OUT/scaled" "$OUT/heldout.json" --out "$OUT/loss-scaled"

# 4. How long the stream is at the first position and elsewhere, layer by layer, and how much attention the first gets.
#    Look at: norm_by_position.png, where "into layer 0" begins at $SCALE of the base's and is then the same.
surefoot evaluate norms "$OUT/baseline" --data "$OUT/heldout.json" --out "$OUT/norms-baseline"
surefoot evaluate norms "$OUT/scaled" --data "$OUT/heldout.json" --out "$OUT/norms-scaled"

# 5. Two models that any program opens. The factor is multiplied into the embedding's row of BOS.
#    Look at: every difference is below what is allowed; export.json has them all.
surefoot export "$OUT/baseline" --merge --out "$OUT/merged-baseline" --overwrite
surefoot export "$OUT/scaled" --merge --out "$OUT/merged-scaled" --overwrite

# 6. Everything inside both over the same token ids, and how far the second is from the first.
#    Look at: comparison.png (what moved, and where); norms.png of both, top left.
CAPTURES=$OUT/captures
surefoot capture "$OUT/merged-baseline" --seq-len 128 --attention --out "$CAPTURES/baseline" --overwrite
surefoot capture "$OUT/merged-scaled" --attention --out "$CAPTURES/scaled" --against "$CAPTURES/baseline" --overwrite
