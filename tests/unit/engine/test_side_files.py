"""A role's folder in a checkpoint says what model it holds."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.engine import train_state
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.state_files import merge_parts, role_entries
from tests.unit.weights.folders_of import make_folder


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """A critic in fp32 whose `load` is a language model in bf16."""
    make_folder(tmp_path / "load", "llama")
    fields = SimpleNamespace(source=tmp_path / "load", head=Head.SCORE, dtype=torch.float32)
    fields.describe = lambda folder: MegatronEngine.describe(fields, folder)  # type: ignore[arg-type]
    return fields


def test_the_head_and_the_dtype_of_training_are_described(engine: Any, tmp_path: Path) -> None:
    files = engine.describe(tmp_path)
    assert files == [tmp_path / "config.json", tmp_path / "tokenizer.json"]
    config = json.loads(files[0].read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["torch_dtype"] == "float32" and config["num_labels"] == 1


def test_every_rank_lists_its_files_and_the_first_rank_also_config_and_tokenizer(
    engine: Any, tmp_path: Path
) -> None:
    for rank in (0, 1):
        texts = {train_state.RANDOM_FILE.format(rank): "{}"}
        train_state._write_and_hash(rank, [], texts, tmp_path, engine.describe)
    merge_parts(tmp_path, 2)
    listed = role_entries(tmp_path)
    first, second = listed[:4], listed[4:]
    own = ["state_00000.safetensors", "random/rank_00000.json"]
    assert [entry["path"] for entry in first] == [*own, "config.json", "tokenizer.json"]
    content = (tmp_path / "config.json").read_bytes()
    assert first[2]["sha256"] == hashlib.sha256(content).hexdigest()
    names = ["state_00001.safetensors", "random/rank_00001.json"]
    assert [entry["path"] for entry in second] == names
