# Sourced by the scripts of a step, two folders below it: `launch OUTPUT FLAGS…` starts the step's main.py.
#
# What it prints also goes to OUTPUT/training.log. Paths are relative to the folder where the script is called.
set -euo pipefail

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
fi

_scripts="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)"
_step="$(cd "$_scripts/../.." && pwd)"
_chat="$(cd "$_step/../.." && pwd)"

launch() {
    local output="$1"
    shift
    mkdir -p "$output"
    "$_chat/bin/deepspeed" ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} "$_step/main.py" "$@" --output_dir "$output" 2>&1 |
        tee -a "$output/training.log"
}

# `average ZERO…`: the flag for a moving average of the policy, which needs whole weights on every GPU: not at stage 3.
average() {
    case "$*" in
    *3*) ;;
    *) echo --enable_ema ;;
    esac
}
