#!/usr/bin/env bash
# Prompts for PPO with Qwen3: convert rows of INPUT to the indexed data set OUTPUT_PREFIX, which
# data.data_path takes. Variables: INPUT TOKENIZER OUTPUT_PREFIX WORKERS MAP_KEYS PYTHON; further
# arguments go to preprocess_data.py (for example --seq-length 512).
set -euo pipefail
# shellcheck source=examples/mcore/cann.sh
source "$(dirname "${BASH_SOURCE[0]}")/../cann.sh"
source_cann

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
default_keys='{"prompt": "question", "query": "", "response": "answer"}'

"${PYTHON:-python}" "$root/preprocess_data.py" \
  --input "${INPUT:-./dataset/gsm8k/train.jsonl}" \
  --tokenizer-name-or-path "${TOKENIZER:-./model_from_hf/qwen3-hf}" \
  --tokenizer-type PretrainedFromHF \
  --output-prefix "${OUTPUT_PREFIX:-./dataset/qwen3-hf/gsm8k}" \
  --handler-name PPOAlpacaStyleInstructionHandler \
  --prompt-type qwen3 \
  --map-keys "${MAP_KEYS:-$default_keys}" \
  --workers "${WORKERS:-4}" \
  --log-interval 1000 \
  "$@"
