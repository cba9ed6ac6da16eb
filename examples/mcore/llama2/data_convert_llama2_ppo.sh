#!/usr/bin/env bash
# Prompts for PPO with Llama 2: rows of INPUT become the indexed data set OUTPUT_PREFIX, which
# data.data_path takes. Variables: INPUT TOKENIZER OUTPUT_PREFIX WORKERS MAP_KEYS PYTHON; further
# arguments go to preprocess_data.py (for example --seq-length 512).
set -euo pipefail

CANN_ENV="${CANN_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
if [[ -f "$CANN_ENV" ]]; then
  set +u # it reads variables that may be unset
  # shellcheck disable=SC1090
  source "$CANN_ENV"
  set -u
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
default_keys='{"prompt": "instruction", "query": "input", "response": "output"}'

"${PYTHON:-python}" "$root/preprocess_data.py" \
  --input "${INPUT:-./dataset/alpaca/train.parquet}" \
  --tokenizer-name-or-path "${TOKENIZER:-./model_from_hf/llama2-hf}" \
  --tokenizer-type PretrainedFromHF \
  --output-prefix "${OUTPUT_PREFIX:-./dataset/llama2-hf/alpaca}" \
  --handler-name PPOAlpacaStyleInstructionHandler \
  --prompt-type llama2 \
  --map-keys "${MAP_KEYS:-$default_keys}" \
  --workers "${WORKERS:-4}" \
  --log-interval 1000 \
  "$@"
