# shellcheck shell=bash
# Shared code of the training scripts ray_*.sh in the folders beside this file, which source it.
#
# Environment variables of a script:
#   CONFIG_NAME, CONFIG_DIR   configuration to run instead of the script's own
#   WEIGHTS=hf|mcore          load Hugging Face folders (hf), or the folders that the scripts
#                             ckpt_convert_*_hf2mcore*.sh have written (mcore)
#   DEVICE=npu|cuda|cpu       kind of the devices (npu)
#   DEVICES_PER_NODE=8        number of devices of this node
#   NNODES, NODE_RANK         number of nodes, and the index of this one; node 0 runs the training
#   MASTER_ADDR, MASTER_PORT  address of node 0, and Ray's port on it (6344)
#   WAIT_S=600                longest wait for node 0, and for the devices of all nodes, seconds
#   PYTHON=python             interpreter with mindspeed_rlxf and ray installed
#   DRY_RUN=1                 print the commands instead of running them
#   RAY_AUTH_TOKEN_PATH       file with Ray's token (~/.ray/auth_token), or
#   RAY_AUTH_TOKEN            the token itself; the scripts for one node make a token without these
#   RAY_TMPDIR                folder for Ray's files; default: a new one in /tmp, removed at the end
# Arguments of a script are passed on to ray_gpt.py: key=value, dry_run=true, ...

# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/cann.sh"
DEVICE=${DEVICE:-npu}
DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
MASTER_PORT=${MASTER_PORT:-6344}
WAIT_S=${WAIT_S:-600}
POLL_S=${POLL_S:-1} # seconds between two checks whether Ray listens
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
ray_pid="" driver_pid="" stopping="" own_folder=""
loads=()
OWN_RAY=("$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats)

# Print an error and exit with 2.
fail() {
  echo "error: $*" >&2
  exit 2
}

# Run a command, or with DRY_RUN print it.
run() {
  if [ -n "$DRY_RUN" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# Make a token for the Ray of this script, unless the environment names one.
make_token() {
  if [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN
  fi
}

# Use the token for Ray if there is one: anyone who can connect to a Ray without one can run code in it.
use_token() {
  if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "${RAY_AUTH_TOKEN_PATH:-${HOME:-}/.ray/auth_token}" ]; then
    export RAY_AUTH_MODE=token
  else
    echo "note: no token for Ray, so its cluster is open; '(umask 077; ray get-auth-token --generate)'" \
      "makes ~/.ray/auth_token, to put on every node" >&2
  fi
}

# Make a folder for Ray's files that no other user can enter, because Ray makes them readable to all.
make_private_folder() {
  [ -z "${RAY_TMPDIR:-}" ] && [ -z "$DRY_RUN" ] || return 0
  own_folder=$(mktemp -d /tmp/rlxf-ray-XXXXXXXX)
  export RAY_TMPDIR=$own_folder
}

# Handle signals from now on, check DEVICE, raise the limit of open files, load CANN, and use the
# token for Ray.
prepare_host() {
  trap forward INT TERM
  case $DEVICE in npu | cuda | cpu) ;; *) fail "DEVICE=$DEVICE must be npu, cuda or cpu" ;; esac
  ulimit -n 32768 2>/dev/null ||
    echo "note: 'ulimit -n 32768' is not allowed here, the limit stays at $(ulimit -n)" >&2
  if [ "$DEVICE" = npu ]; then source_cann; fi
  use_token
}

# Print the option of `ray start` that declares the devices of this node.
device_options() {
  case $DEVICE in
    npu) echo "--resources={\"NPU\": $DEVICES_PER_NODE}" ;;
    cuda) echo "--num-gpus=$DEVICES_PER_NODE" ;;
    cpu) echo "--resources={\"rlxf_cpu\": $DEVICES_PER_NODE}" ;;
  esac
}

master_listens() {
  (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null
}

# End the Ray that this script has started; `ray stop` would end every Ray of this user.
stop_ray() {
  if [ -n "$ray_pid" ] && kill -0 "$ray_pid" 2>/dev/null; then
    kill -TERM "$ray_pid" 2>/dev/null || true
    wait "$ray_pid" 2>/dev/null || true
  fi
  ray_pid=""
  [ -z "$own_folder" ] || rm -rf "$own_folder"
}

# Pass a signal on to the training, which finishes its iteration, saves and ends; without one, end
# with 75.
forward() {
  [ -n "$driver_pid" ] || exit 75
  stopping=1
  [ "$driver_pid" = starting ] || kill -TERM "$driver_pid" 2>/dev/null || true
}

# wait_for_end PID: wait until a child has ended, and return its exit code.
wait_for_end() {
  # A signal ends `wait` early, with the signal's code: only after the child's end it has the child's.
  while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
  wait "$1"
}

# run_driver ARGUMENTS: run ray_gpt.py on the started Ray, in the background, because bash holds
# signals back while a command runs in the foreground; return its exit code. `forward` passes signals
# on to it.
run_driver() {
  local code=0
  local command=(env "RAY_ADDRESS=$MASTER_ADDR:$MASTER_PORT" "$PYTHON" "$REPOSITORY/ray_gpt.py" "$@")
  if [ -n "$DRY_RUN" ]; then
    run "${command[@]}"
    return
  fi
  driver_pid=starting
  "${command[@]}" &
  driver_pid=$!
  [ -z "$stopping" ] || kill -TERM "$driver_pid"
  wait_for_end "$driver_pid" || code=$?
  driver_pid=""
  # 143: the signal came while Python was starting and could not handle it.
  [ -z "$stopping" ] || [ "$code" -ne 143 ] || code=75
  return "$code"
}

# start_head OPTIONS: start Ray's head with these options of `ray start`, and wait until it listens.
start_head() {
  if [ -n "$DRY_RUN" ]; then
    run "${OWN_RAY[@]}" "$@"
    return
  fi
  master_listens && fail "$MASTER_ADDR:$MASTER_PORT is taken; end that Ray or set MASTER_PORT"
  trap stop_ray EXIT
  make_private_folder
  "${OWN_RAY[@]}" "$@" &
  ray_pid=$!
  local deadline=$((SECONDS + WAIT_S))
  until master_listens; do
    kill -0 "$ray_pid" 2>/dev/null || fail "Ray did not start; its message is above"
    [ $SECONDS -lt $deadline ] || fail "Ray did not listen at $MASTER_ADDR:$MASTER_PORT in $WAIT_S s"
    sleep "$POLL_S"
  done
}

# Set `loads` to the overrides that load the weights chosen by WEIGHTS.
choose_weights() {
  local model folder
  case ${WEIGHTS:-hf} in
    hf) return ;;
    mcore) ;;
    *) fail "WEIGHTS=$WEIGHTS must be hf or mcore" ;;
  esac
  [ -z "${CONFIG_NAME:-}" ] ||
    fail "WEIGHTS=mcore is for the script's own configuration; name the folders that" \
      "$CONFIG_NAME is to load: actor_rollout.load=..."
  model=$(basename "$(cd "$(dirname "$0")" && pwd)")
  folder=./model_weights/$model-mcore
  loads=("actor_rollout.load=$folder" "ref.load=$folder"
    "critic.load=$folder-orm" "reward.load=$folder-orm")
}

# train CONFIG [default overrides] -- [arguments of the user]: run ray_gpt.py on the started Ray.
train() {
  local config=$1 defaults=() directory=()
  shift
  while [ "$1" != -- ]; do
    defaults+=("$1")
    shift
  done
  shift
  if [ -n "${CONFIG_NAME:-}" ]; then # the defaults are for the script's own configuration
    config=$CONFIG_NAME
    defaults=()
  fi
  [ -z "${CONFIG_DIR:-}" ] || directory=(--config-dir "$CONFIG_DIR")
  # Empty arrays are unbound variables in old bash.
  run_driver --config-name "$config" ${directory[@]+"${directory[@]}"} "device.kind=$DEVICE" \
    "device.devices_per_node=$DEVICES_PER_NODE" ${defaults[@]+"${defaults[@]}"} \
    ${loads[@]+"${loads[@]}"} \
    "++resource_pool.wait_s=$WAIT_S" "$@"
}

# one_node CONFIG [default overrides] -- "$@": start Ray on this host alone, then train.
one_node() {
  MASTER_ADDR=127.0.0.1
  export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # makes Ray listen on loopback only
  make_token
  choose_weights
  prepare_host
  start_head --head "--node-ip-address=$MASTER_ADDR" "--port=$MASTER_PORT" \
    --include-dashboard=false "$(device_options)"
  train "$@"
}

# multi_node CONFIG [default overrides] -- "$@": start Ray on this node, on node 0 also train. The
# same script has to run on every node.
multi_node() {
  NNODES=${NNODES:-2} NODE_RANK=${NODE_RANK:-0}
  [ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR must be the address of node 0; export it"
  [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES"
  choose_weights
  prepare_host
  if [ "$NODE_RANK" -eq 0 ]; then
    # Nothing listens on the dashboard's port unless ray[default] is installed.
    start_head --head "--node-ip-address=$MASTER_ADDR" "--port=$MASTER_PORT" \
      --dashboard-host=127.0.0.1 --dashboard-port="${DASHBOARD_PORT:-8260}" "$(device_options)"
    train "$@"
  else
    join_master
  fi
}

# Start Ray on a node other than node 0: join as soon as node 0 listens, and end when it ends.
join_master() {
  local deadline=$((SECONDS + WAIT_S)) said=0
  local join=("${OWN_RAY[@]}" "--address=$MASTER_ADDR:$MASTER_PORT" "$(device_options)")
  if [ -n "$DRY_RUN" ]; then
    run "${join[@]}"
    return
  fi
  until master_listens; do
    [ $SECONDS -lt $deadline ] ||
      fail "no Ray at $MASTER_ADDR:$MASTER_PORT in $WAIT_S s; start this script on node 0"
    if [ $SECONDS -ge $said ]; then
      echo "waiting for Ray at $MASTER_ADDR:$MASTER_PORT"
      said=$((SECONDS + 15))
    fi
    sleep "$POLL_S"
  done
  trap stop_ray EXIT
  trap 'exit 75' INT TERM
  make_private_folder
  "${join[@]}" & # not by `run`: a signal has to reach Ray itself, not a subshell
  ray_pid=$!
  # Ray itself takes a minute to notice that node 0 has ended.
  while kill -0 "$ray_pid" 2>/dev/null && master_listens; do sleep "$POLL_S"; done
  if master_listens; then
    echo "error: Ray ended on this node; its message is above" >&2
    exit 1
  fi
  echo "node 0 has ended; see its console for the result of the run"
}
