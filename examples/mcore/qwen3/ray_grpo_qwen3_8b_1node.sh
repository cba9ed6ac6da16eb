#!/usr/bin/env bash
# GRPO of Qwen3 8B on this host: all roles share 8 devices of 64 GB, answers checked by rule.
# Variables: see ../common.sh; arguments are added to those of ray_gpt.py.
set -euo pipefail
# shellcheck source=examples/mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
one_node grpo_trainer_qwen3_8b_1node -- "$@"
