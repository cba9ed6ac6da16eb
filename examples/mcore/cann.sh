# shellcheck shell=bash
# Sourced by the scripts of the folders beside it. CANN_ENV names the set_env.sh of CANN.

# The environment of CANN, where it is installed.
source_cann() {
  local script=${CANN_ENV:-${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}/set_env.sh}
  if [ -f "$script" ]; then
    set +u # it reads variables that may be unset
    # shellcheck source=/dev/null
    source "$script"
    set -u
  fi
}
