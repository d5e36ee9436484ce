#!/usr/bin/env bash
# Where newer versions have it:  run_350m.sh, see training_scripts/single_node/run_350m.sh
exec bash "$(dirname "$0")/../../single_node/run_350m.sh" "$@"
