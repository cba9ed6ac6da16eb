# shellcheck shell=bash
# Shared code of the launchers in this folder, which source it. Variables: see ../mcore/common.sh, and
#   NODES                number of nodes (set by the launcher)
#   DEVICES              number of devices to wait for (NODES x DEVICES_PER_NODE)
#   LOOK_S=5             seconds between two counts of the devices that have joined
# Exit codes are those of ray_gpt.py: 0 done, 1 failed, 2 wrong input, 75 stopped: the same command
# resumes the run.

# shellcheck source=../mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../mcore/common.sh"

helpers=()

# End Ray on this node, then wait for the helpers: nodes that joined end when the head is gone. Those
# that still run after 30 s are ended.
stop_all() {
  trap '' INT TERM
  stop_ray
  local deadline=$((SECONDS + 30)) pid
  for pid in ${helpers[@]+"${helpers[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
}

# Name of the Ray resource that stands for one device.
resource() {
  case $DEVICE in
    npu) echo NPU ;;
    cuda) echo GPU ;;
    cpu) echo rlxf_cpu ;;
  esac
}

# Print the number of devices in the Ray cluster.
devices_joined() {
  RAY_ADDRESS="$MASTER_ADDR:$MASTER_PORT" "$PYTHON" - "$(resource)" <<'PYTHON_CODE'
import logging
import sys

import ray

ray.init(logging_level=logging.ERROR, log_to_driver=False)
print(int(ray.cluster_resources().get(sys.argv[1], 0)))
PYTHON_CODE
}

# wait_for_devices N: wait until the cluster has N devices; exit with 75 after WAIT_S seconds.
wait_for_devices() {
  local wanted=$1 deadline=$((SECONDS + WAIT_S)) said=0 found pid
  [ -z "$DRY_RUN" ] || return 0
  while true; do
    found=$(devices_joined) || found=0
    [ "$found" -lt "$wanted" ] || return 0
    for pid in ${helpers[@]+"${helpers[@]}"}; do
      kill -0 "$pid" 2>/dev/null || fail "a node did not start Ray; its message is above"
    done
    if [ $SECONDS -ge $deadline ]; then
      echo "stopped: $found of $wanted devices joined within WAIT_S=$WAIT_S s" >&2
      exit 75
    fi
    if [ $SECONDS -ge $said ]; then
      echo "waiting for devices: $found of $wanted have joined"
      said=$((SECONDS + 15))
    fi
    sleep "${LOOK_S:-5}"
  done
}

# launch ARGUMENTS: start Ray's head here, call `start_nodes` of the launcher for the other nodes, wait
# for all devices, then run ray_gpt.py.
launch() {
  [ $# -gt 0 ] || fail "give the arguments of ray_gpt.py: --config-name NAME [key=value ...]"
  make_token # for this run; `start_nodes` passes it to the other nodes
  prepare_host
  start_head --head "--node-ip-address=$MASTER_ADDR" "--port=$MASTER_PORT" \
    --include-dashboard=false "$(device_options)"
  trap stop_all EXIT
  start_nodes
  wait_for_devices "${DEVICES:-$((NODES * DEVICES_PER_NODE))}"
  run_driver "$@" "device.kind=$DEVICE" "device.devices_per_node=$DEVICES_PER_NODE"
}
