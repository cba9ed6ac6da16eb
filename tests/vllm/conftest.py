"""The environment with vLLM, and a model that it can load."""

import os
from pathlib import Path

import pytest

from mindspeed_rlxf.config.schema import ArchitectureConfig
from tests.distributed.llamas import make_llama

ARCHITECTURE = ArchitectureConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=2, num_query_groups=1,
    vocab_size=16, max_position_embeddings=512, untie_embeddings_and_output_weights=False,
)  # fmt: skip


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM."""
    python = os.environ.get("RLXF_VLLM_PYTHON", "")
    if not python:
        pytest.skip("needs vLLM; `make test-vllm` installs it and sets RLXF_VLLM_PYTHON")
    return python


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tied head, whose heads have a size that vLLM supports."""
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder, ARCHITECTURE)
    return folder
