"""Loading a rank's shards, and writing them back on one rank."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from mindspeed_rlxf.models.parameters import Head, shard_shape, stage_parameters
from mindspeed_rlxf.weights import stage_loader as weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.stage_loader import StageWeights
from tests.unit.models.test_heads import Group
from tests.unit.weights.folders_of import architecture_of, assert_same, make_folder, read_folder

A = architecture_of("llama")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_folder(tmp_path / "source", "llama")
    (tmp_path / "source" / "notes.txt").write_text("not of the model", encoding="utf-8")
    return tmp_path / "source"


def stage(head: Head, tp_rank: int = 0, tp: int = 1) -> StageWeights:
    """The parameters of one rank, with nan for what loading leaves out."""
    named = [
        (parameter.name, Parameter(torch.full(shard_shape(parameter, A, tp), torch.nan)))
        for parameter in stage_parameters(A, head)
    ]
    module: Any = SimpleNamespace(named_parameters=lambda: named)
    return StageWeights(module, A, head, Group(tp_rank, tp), Group(0, 1), Group(0, 1))  # type: ignore[arg-type]


def test_a_rank_loads_all_of_its_shard_and_zeros_for_padding(source: Path) -> None:
    last = stage(Head.LANGUAGE_MODEL, 1, 2)
    assert last.load(open_hf_folder(source)) == []
    assert not any(t.isnan().any() for t in last.tensors.values())
    embedding = last.tensors["embedding.word_embeddings.weight"]
    assert embedding.shape == (19, 16)  # of 37 ids the last 18, and one of padding
    assert embedding[:18].any(dim=1).all() and not embedding[18].any()


def test_a_missing_score_head_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path
) -> None:
    rank = stage(Head.SCORE)
    assert rank.load(open_hf_folder(source)) == ["score.weight"]
    assert rank.tensors["score.weight"].isnan().all()
    rank.tensors["score.weight"].data.fill_(0.25)
    alone = lambda gathered, mine, group: gathered.__setitem__(0, mine)  # noqa: E731
    monkeypatch.setattr(weights.dist, "all_gather_object", alone)
    assert rank.export(tmp_path / "target", source, True) is None
    files = sorted(path.name for path in (tmp_path / "target").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    got, expected = read_folder(tmp_path / "target"), read_folder(source)
    del expected["lm_head.weight"]
    assert (got.pop("score.weight") == 0.25).all()
    assert_same(got, expected)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"} and config["vocab_size"] == 37
