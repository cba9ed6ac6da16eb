# shellcheck shell=bash
# Scripts in the folders beside this file source it. CANN_ENV: path of CANN's set_env.sh.

# Source the environment of CANN and of ATB, where they are installed. CANN 8.5 and later have their
# set_env.sh in the folder `cann`, older versions in `ascend-toolkit`.
source_cann() {
  local home=/usr/local/Ascend script
  local found=${CANN_ENV:-${ASCEND_TOOLKIT_HOME:-$home/cann}/set_env.sh}
  [ -f "$found" ] || found=$home/ascend-toolkit/set_env.sh
  for script in "$found" "$home/nnal/atb/set_env.sh"; do
    if [ -f "$script" ]; then
      set +u # the script reads variables that may be unset
      # shellcheck source=/dev/null
      source "$script"
      set -u
    fi
  done
}
