"""Real vLLM servers compute adapters as training does, also those that bf16 would round away."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import KeptPools, ray_runtime, warm_runtime
from tests.distributed.llamas import VOCAB, make_llama, run_config
from tests.distributed.test_lora_generation import LORA, check_gaps
from tests.vllm.conftest import ARCHITECTURE

pytestmark = pytest.mark.vllm
__all__ = ["ray_runtime", "warm_runtime"]


@pytest.fixture(scope="module")
def kept_pools(ray_runtime: Any) -> KeptPools:
    """The ranks are Ray's, as those of users."""
    return KeptPools(ray_runtime)


@pytest.mark.parametrize("bf16", [False, True])
def test_log_probs_of_a_server_and_of_training_differ_by_rounding_alone(
    vllm_python: str, warm_runtime: Any, tmp_path: Path, bf16: bool
) -> None:
    architecture = ARCHITECTURE.model_copy(update={"vocab_size": VOCAB})
    make_llama(tmp_path, architecture)
    config = run_config(
        tmp_path, tmp_path, architecture, {"bf16": bf16}, actor_rollout={"lora": LORA}
    )
    vllm = config.rollout.vllm.model_copy(update={"python": vllm_python, "kv_cache_gib": 0.25})
    rollout = config.rollout.model_copy(update={"engine": "vllm", "vllm": vllm})
    check_gaps(warm_runtime, config.model_copy(update={"rollout": rollout}))
