"""A small complete configuration whose run directory is below `tmp_path`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import CONFIGURED
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    ArchitectureConfig,
    CriticConfig,
    DataConfig,
    RefConfig,
    RewardConfig,
    RunConfig,
    TrainingConfig,
)

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Return a function that makes a RunConfig; its keyword arguments are keys of `training`."""
    architecture = ArchitectureConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    model = {"model": "tiny", "architecture": architecture}

    def make(**training: object) -> RunConfig:
        defaults = {
            "train_iters": 2, "global_batch_size": 4, "seq_length": 16,
            "tokenizer_name_or_path": "größe", "output_dir": str(tmp_path / "outputs" / "run"),
            "run_name": "run",
        }  # fmt: skip
        return RunConfig(
            name="tiny", training=TrainingConfig(**{**defaults, **training}),
            actor_rollout=ActorConfig(**model, max_new_tokens=8),
            ref=RefConfig(**model), critic=CriticConfig(**model),
            reward=RewardConfig(**model), placement=dict.fromkeys(CONFIGURED, "all"),
            resource_pool={"all": [1]}, data=DataConfig(train_files=["train.jsonl"]),
        )  # fmt: skip

    return make
