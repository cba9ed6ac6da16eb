#!/usr/bin/env bash
# Run ray_gpt.py on hosts that ssh reaches without a password; call this script on the first host.
#
#   HOSTS="node1 node2" DEVICE=npu DEVICES_PER_NODE=8 \
#     bash examples/launch/ssh/train.sh --config-name ppo_trainer_llama3_8b [key=value ...]
#
# HOSTS        hosts of the run, this one first; or HOST_FILE, a file with one host per line
# MASTER_ADDR  address of this host that the others can reach (default: that of the first host's name)
# RAY_AUTH_TOKEN_PATH  file with Ray's token on every host; without it a token is made for the run
# SSH          command that runs a command on a host (ssh -o BatchMode=yes -o ConnectTimeout=10)
# The repository and PYTHON must have the same path on every host. Ray is started on all hosts and
# ends with the run; the exit code is that of ray_gpt.py.
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
if [[ ! $MASTER_ADDR =~ ^[0-9.]+$|: ]]; then # a name: Ray needs a numeric address
  resolved=$(getent ahostsv4 "$MASTER_ADDR" | awk 'NR == 1 {print $1}') || true
  [ -n "$resolved" ] || fail "MASTER_ADDR=$MASTER_ADDR must be an address or a name that resolves here"
  MASTER_ADDR=$resolved
fi

# ssh passes one line to the remote shell, so every word is quoted.
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
