#!/usr/bin/env bash
# PPO of Llama 3.1 8B on two nodes with 8 devices each, all roles on each: run it on both, NODE_RANK=0 and 1.
# Variables: see ../common.sh; arguments are added to those of ray_gpt.py.
set -euo pipefail
# shellcheck source=examples/mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
multi_node ppo_trainer_llama31_8b_1node \
  '~resource_pool' '+resource_pool={main: [8, 8]}' \
  -- "$@"
