#!/usr/bin/env bash
# Start Ray on a node other than the head: join MASTER_ADDR:MASTER_PORT as soon as it listens, and end
# when the head ends. The launchers call this script; variables: see ../mcore/common.sh.
set -euo pipefail
# shellcheck source=../mcore/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../mcore/common.sh"
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR must be the address of the head; the launcher sets it"
if [ -n "${TOKEN_ON_INPUT:-}" ]; then # not as an argument, which every user of the host could read
  IFS= read -r RAY_AUTH_TOKEN
  export RAY_AUTH_TOKEN
fi
prepare_host
join_master
