#!/usr/bin/env bash
# A Megatron checkpoint of Llama 3.2 in LOAD_DIR becomes a Hugging Face folder: HF_DIR/mg2hf, where
# HF_DIR is the original. Variables: LOAD_DIR HF_DIR PYTHON; further arguments go to convert_ckpt.py
# (for example --orm for a reward model).
set -euo pipefail

CANN_ENV="${CANN_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
if [[ -f "$CANN_ENV" ]]; then
  set +u # it reads variables that may be unset
  # shellcheck disable=SC1090
  source "$CANN_ENV"
  set -u
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

"${PYTHON:-python}" "$root/convert_ckpt.py" \
  --model-type-hf llama2 \
  --load-model-type mg \
  --save-model-type hf \
  --load-dir "${LOAD_DIR:-./model_weights/llama32-mcore}" \
  --save-dir "${HF_DIR:-./model_from_hf/llama-3.2-1b-hf}" \
  "$@"
