#!/usr/bin/env bash
# Prompts for PPO with Llama 2: convert rows of INPUT to the indexed data set OUTPUT_PREFIX, which
# data.data_path takes. Variables: INPUT TOKENIZER OUTPUT_PREFIX WORKERS MAP_KEYS PYTHON; further
# arguments go to preprocess_data.py (for example --seq-length 512).
set -euo pipefail
# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/../cann.sh"
source_cann

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
default_keys='{"prompt": "prompt", "query": "", "response": "", "system": ""}'

"${PYTHON:-python}" "$root/preprocess_data.py" \
  --input "${INPUT:-./dataset/descriptiveness-00000-of-00001.parquet}" \
  --tokenizer-name-or-path "${TOKENIZER:-./model_from_hf/llama2-hf}" \
  --tokenizer-type PretrainedFromHF \
  --output-prefix "${OUTPUT_PREFIX:-./dataset/llama2-hf/descriptiveness}" \
  --handler-name PPOAlpacaStyleInstructionHandler \
  --prompt-type llama2 \
  --map-keys "${MAP_KEYS:-$default_keys}" \
  --workers "${WORKERS:-4}" \
  --log-interval 1000 \
  "$@"
