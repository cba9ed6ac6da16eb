#!/usr/bin/env bash
# Convert Llama 3.1 reward model in HF_DIR to a Megatron checkpoint of TP x PP ranks in SAVE_DIR. Variables:
# HF_DIR SAVE_DIR TP PP PYTHON; further arguments go to convert_ckpt.py (for example
# --params-dtype bf16, or --ckpt-format torch_dist).
set -euo pipefail
# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/../cann.sh"
source_cann

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

"${PYTHON:-python}" "$root/convert_ckpt.py" \
  --model-type-hf llama2 \
  --load-model-type hf \
  --save-model-type mg \
  --target-tensor-parallel-size "${TP:-8}" \
  --target-pipeline-parallel-size "${PP:-1}" \
  --orm \
  --load-dir "${HF_DIR:-./model_from_hf/llama31-hf-orm}" \
  --save-dir "${SAVE_DIR:-./model_weights/llama31-mcore-orm}" \
  "$@"
