#!/usr/bin/env bash
# Where newer versions have it:  run_1.3b.sh, see training_scripts/single_node/run_1.3b.sh
exec bash "$(dirname "$0")/../../single_node/run_1.3b.sh" "$@"
