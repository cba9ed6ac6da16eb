"""Which layers of transformers' models keep a score for each pair of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.ops.planning.sharded_memory import scored_layers
from tests.distributed.fsdp_models import make_family

MISTRAL = {"model_type": "mistral", "sliding_window": 6}


@pytest.mark.parametrize(
    ("name", "changes", "length", "wanted"),
    [
        ("llama", {}, 20, (0, False)),
        ("qwen3_5", {}, 20, (0, False)),
        ("gemma2", {}, 5, (2, True)),  # a cap
        ("gpt_oss", {}, 5, (2, True)),  # sinks
        ("llama", MISTRAL, 7, (2, False)),
        ("llama", MISTRAL, 6, (0, False)),  # the window holds the sequence
    ],
)
def test_layers_with_windows_caps_and_sinks_are_counted(
    tmp_path: Path, name: str, changes: dict[str, Any], length: int, wanted: tuple[int, bool]
) -> None:
    folder, _, _ = make_family(tmp_path, name)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))
    assert scored_layers(str(folder), length) == wanted
