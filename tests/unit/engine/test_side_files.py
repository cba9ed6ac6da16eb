"""A role's folder in a checkpoint says what model it holds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.models.parameters import Head
from tests.unit.weights.folders_of import make_folder


def test_the_head_and_the_dtype_of_training_are_described(tmp_path: Path) -> None:
    """A critic in fp32 whose `load` is a language model in bf16."""
    make_folder(tmp_path / "load", "llama")
    engine: Any = SimpleNamespace(source=tmp_path / "load", head=Head.SCORE, dtype=torch.float32)
    files = MegatronEngine.describe(engine, tmp_path)
    assert files == [tmp_path / "config.json", tmp_path / "tokenizer.json"]
    config = json.loads(files[0].read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["torch_dtype"] == "float32" and config["num_labels"] == 1
