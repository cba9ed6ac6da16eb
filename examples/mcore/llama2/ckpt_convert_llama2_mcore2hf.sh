#!/usr/bin/env bash
# Convert a Megatron checkpoint of Llama 2 in LOAD_DIR to a Hugging Face folder: HF_DIR/mg2hf, where
# HF_DIR is the original. Variables: LOAD_DIR HF_DIR PYTHON; further arguments go to convert_ckpt.py
# (for example --orm for a reward model).
set -euo pipefail
# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/../cann.sh"
source_cann

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

"${PYTHON:-python}" "$root/convert_ckpt.py" \
  --model-type-hf llama2 \
  --load-model-type mg \
  --save-model-type hf \
  --load-dir "${LOAD_DIR:-./model_weights/llama2-mcore}" \
  --save-dir "${HF_DIR:-./model_from_hf/llama2-hf}" \
  "$@"
