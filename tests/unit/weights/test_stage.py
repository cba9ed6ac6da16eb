"""Loading shards and writing them back, with ranks whose collectives read each other's tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from mindspeed_rlxf.models.parameters import Head, shard_shape, stage_parameters
from mindspeed_rlxf.weights import stage_loader as weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.stage_loader import StageWeights
from tests.unit.weights.folders_of import architecture_of, assert_same, make_folder, read_folder

LM, SCORE = Head.LANGUAGE_MODEL, Head.SCORE


A = architecture_of("llama")


@dataclass(frozen=True)
class Group:
    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_folder(tmp_path / "source", "llama")
    (tmp_path / "source" / "notes.txt").write_text("not of the model", encoding="utf-8")
    return tmp_path / "source"


def stage(head: Head, tp: Group, pp: Group) -> StageWeights:
    """The parameters of one rank, with nan for what loading leaves out."""
    named = [
        (parameter.name, Parameter(torch.full(shard_shape(parameter, A, tp.size()), torch.nan)))
        for parameter in stage_parameters(A, head, pp.rank(), pp.size())
    ]
    module: Any = SimpleNamespace(named_parameters=lambda: named)
    return StageWeights(module, A, head, tp, pp, Group(0, 1))  # type: ignore[arg-type]


def ranks_of(
    monkeypatch: pytest.MonkeyPatch, head: Head, tp: int, pp: int
) -> list[list[StageWeights]]:
    """[pp][tp] ranks; a broadcast reads the same parameter of the source."""
    ranks = [[stage(head, Group(t, tp), Group(p, pp)) for t in range(tp)] for p in range(pp)]
    gathered: list[tuple[int, str]] = []  # stage and name of the parameter
    gather = StageWeights.hf_tensors

    def hf_tensors(self: StageWeights, parameter: Any, keep: bool = True) -> dict[str, Tensor]:
        gathered[:] = [(self.pp_group.rank(), parameter.name)]
        return gather(self, parameter, keep)

    def broadcast(tensor: Tensor, src: int, group: Group) -> None:
        [(p, name)] = gathered
        tensor.copy_(ranks[p][src].tensors[name].detach())

    monkeypatch.setattr(StageWeights, "hf_tensors", hf_tensors)
    monkeypatch.setattr(weights.dist, "broadcast", broadcast)
    monkeypatch.setattr(weights.dist, "get_global_rank", lambda group, rank: rank)
    return ranks


def export(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[list[StageWeights]],
    target: Path,
    source: Path,
    described: Path | None = None,
) -> None:
    """The last stage first, so that the first one knows what the others wrote."""
    files: list[Any] = [[]] * len(ranks)

    def all_gather_object(gathered: list[Any], mine: Any, group: Group) -> None:
        if group.size() == 1:
            gathered[:] = [mine]
            return
        files[group.rank()] = mine
        gathered[:] = files

    monkeypatch.setattr(weights.dist, "all_gather_object", all_gather_object)
    for row in reversed(ranks):
        for rank in reversed(row):
            rank.export(target, source, rank.tp_group.rank() == 0, described)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_written_is_what_was_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, tp: int, pp: int
) -> None:
    ranks = ranks_of(monkeypatch, LM, tp, pp)
    for rank in (rank for row in ranks for rank in row):
        assert rank.load(open_hf_folder(source)) == []
        assert not any(t.isnan().any() for t in rank.tensors.values())
    target = tmp_path / "target"
    export(monkeypatch, ranks, target, source)
    expected = read_folder(source)
    assert_same(read_folder(target), expected)
    files = sorted(path.name for path in target.iterdir())
    if pp == 1:
        assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    else:
        assert "model.safetensors.index.json" in files
        assert set(open_hf_folder(target)) == set(expected)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        size = sum(t.numel() * t.element_size() for t in expected.values())
        assert index["metadata"]["total_size"] == size


def test_vocabulary_padding_is_zero(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    ((_, last),) = ranks_of(monkeypatch, LM, 2, 1)
    last.load(open_hf_folder(source))
    embedding = last.tensors["embedding.word_embeddings.weight"]
    assert embedding.shape == (19, 16)  # of 37 ids the last 18, and one of padding
    assert embedding[:18].any(dim=1).all() and not embedding[18].any()


def test_a_missing_score_head_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path
) -> None:
    ((rank,),) = ranks_of(monkeypatch, SCORE, 1, 1)
    assert rank.load(open_hf_folder(source)) == ["score.weight"]
    assert rank.tensors["score.weight"].isnan().all()
    rank.tensors["score.weight"].data.fill_(0.25)
    export(monkeypatch, [[rank]], tmp_path / "target", source)
    got = read_folder(tmp_path / "target")
    assert "lm_head.weight" not in got and (got["score.weight"] == 0.25).all()
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"} and config["vocab_size"] == 37
