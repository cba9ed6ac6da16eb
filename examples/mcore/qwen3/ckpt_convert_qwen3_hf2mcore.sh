#!/usr/bin/env bash
# Convert Qwen3 in HF_DIR to a Megatron checkpoint of TP x PP ranks in SAVE_DIR. Variables:
# HF_DIR SAVE_DIR TP PP PYTHON; further arguments go to convert_ckpt.py (for example
# --params-dtype bf16, or --ckpt-format torch_dist).
set -euo pipefail
# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/../cann.sh"
source_cann

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

"${PYTHON:-python}" "$root/convert_ckpt.py" \
  --model-type-hf qwen3 \
  --load-model-type hf \
  --save-model-type mg \
  --target-tensor-parallel-size "${TP:-4}" \
  --target-pipeline-parallel-size "${PP:-2}" \
  --load-dir "${HF_DIR:-./model_from_hf/qwen3-hf}" \
  --save-dir "${SAVE_DIR:-./model_weights/qwen3-mcore}" \
  "$@"
