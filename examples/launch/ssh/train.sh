#!/usr/bin/env bash
# A run on hosts that ssh reaches without a password; call it on the first of them.
#
#   HOSTS="node1 node2" DEVICE=npu DEVICES_PER_NODE=8 \
#     bash examples/launch/ssh/train.sh --config-name ppo_trainer_llama3_8b [key=value ...]
#
# HOSTS        hosts of the run, the first is this one; or HOST_FILE, one host a line
# MASTER_ADDR  address of this host that the others reach (what they resolve its name to)
# RAY_AUTH_TOKEN_PATH  file with the token of Ray, on every host; otherwise one is made for the run
# SSH          command that runs a command on a host (ssh -o BatchMode=yes -o ConnectTimeout=10)
# The repository, and PYTHON, have to stand at the same place on every host. Ray is started on all
# of them, and ends with the run; the exit code is that of ray_gpt.py.
set -euo pipefail
# shellcheck source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

if [ -z "${HOSTS:-}" ] && [ -n "${HOST_FILE:-}" ]; then
  HOSTS=$(grep -v '^[[:space:]]*\(#\|$\)' "$HOST_FILE" | awk '{print $1}')
fi
[ -n "${HOSTS:-}" ] || fail "HOSTS must name the hosts of the run, or HOST_FILE a file that does"
read -r -a hosts <<<"${HOSTS//$'\n'/ }"
read -r -a ssh_command <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
NODES=${#hosts[@]}
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
if [[ ! $MASTER_ADDR =~ ^[0-9.]+$|: ]]; then # Ray wants a number
  resolved=$(getent ahostsv4 "$MASTER_ADDR" | awk 'NR == 1 {print $1}') || true
  [ -n "$resolved" ] || fail "MASTER_ADDR=$MASTER_ADDR must be an address; its name is not known here"
  MASTER_ADDR=$resolved
fi

# ssh hands on a line for the remote shell, so every word is quoted for it.
start_nodes() {
  local host name line
  for host in "${hosts[@]:1}"; do
    line="env"
    [ -z "${RAY_AUTH_TOKEN:-}" ] || line+=" TOKEN_ON_INPUT=1"
    for name in DEVICE DEVICES_PER_NODE MASTER_ADDR MASTER_PORT WAIT_S POLL_S PYTHON DRY_RUN; do
      line+=" $(printf '%q' "$name=${!name}")"
    done
    line+=" bash $(printf '%q' "$REPOSITORY/examples/launch/node.sh")"
    echo "$host: $line"
    "${ssh_command[@]}" "$host" "$line" <<<"${RAY_AUTH_TOKEN:-}" &
    helpers+=($!)
  done
}

launch "$@"
