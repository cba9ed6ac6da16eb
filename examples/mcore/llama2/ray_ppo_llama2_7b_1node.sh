#!/usr/bin/env bash
# PPO of Llama 2 7B on this host: all roles share 8 devices.
# Variables: see ../common.sh; arguments are added to those of ray_gpt.py.
set -euo pipefail
# shellcheck source=examples/mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
one_node ppo_trainer_llama2_7b \
  placement.actor_rollout=main placement.ref=main placement.critic=main placement.reward=main \
  '~resource_pool' '+resource_pool={main: 8}' \
  training.offload.weights=true training.offload.optimizer=true \
  -- "$@"
