#!/usr/bin/env bash
# Ray on a node beside the head: joins MASTER_ADDR:MASTER_PORT when it listens, ends when it goes.
# The launchers call it; variables as in ../mcore/common.sh.
set -euo pipefail
# shellcheck source=../mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../mcore/common.sh"
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR must be the address of the head; the launcher sets it"
if [ -n "${TOKEN_ON_INPUT:-}" ]; then # never in a command line, which every user of a host sees
  IFS= read -r RAY_AUTH_TOKEN
  export RAY_AUTH_TOKEN
fi
prepare_host
join_master
