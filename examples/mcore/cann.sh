# shellcheck shell=bash
# Sourced by the scripts of the folders beside it. CANN_ENV names the set_env.sh of CANN.

# The environment of CANN and of ATB, where they are installed. CANN 8.5 and later have their script
# in `cann`, older ones in `ascend-toolkit`.
source_cann() {
  local home=/usr/local/Ascend script
  local found=${CANN_ENV:-${ASCEND_TOOLKIT_HOME:-$home/cann}/set_env.sh}
  [ -f "$found" ] || found=$home/ascend-toolkit/set_env.sh
  for script in "$found" "$home/nnal/atb/set_env.sh"; do
    if [ -f "$script" ]; then
      set +u # it reads variables that may be unset
      # shellcheck source=/dev/null
      source "$script"
      set -u
    fi
  done
}
