#!/usr/bin/env bash
# PPO of Llama 3 8B on this host: all roles share 8 devices.
# Variables: see ../common.sh; arguments are added to those of ray_gpt.py.
set -euo pipefail
# shellcheck source=examples/mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
one_node ppo_trainer_llama3_8b_1node -- "$@"
