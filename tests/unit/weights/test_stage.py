"""Loading shards and writing them back, with ranks whose collectives read each other's tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    hf_shapes,
    shard_shape,
    stage_parameters,
)
from mindspeed_rlxf.weights import stage_loader as weights
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.stage_loader import StageWeights

LM, SCORE = Head.LANGUAGE_MODEL, Head.SCORE


@dataclass(frozen=True)
class Group:
    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


def architecture(untied: bool = True) -> ArchitectureConfig:
    return ArchitectureConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        vocab_size=7,
        max_position_embeddings=16,
        untie_embeddings_and_output_weights=untied,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A language model's folder, norms in fp32 and the rest in bf16."""
    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if "norm" in name else torch.bfloat16
        )
        for name, shape in hf_shapes(architecture(), LM).items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 7}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "notes.txt").write_text("not of the model", encoding="utf-8")
    return folder


def stage(a: ArchitectureConfig, head: Head, tp: Group, pp: Group) -> StageWeights:
    """The parameters of one rank, with nan for what loading leaves out."""
    named = [
        (parameter.name, Parameter(torch.full(shard_shape(parameter, a, tp.size()), torch.nan)))
        for parameter in stage_parameters(a, head, pp.rank(), pp.size())
    ]
    module: Any = SimpleNamespace(named_parameters=lambda: named)
    return StageWeights(module, a, head, tp, pp, Group(0, 1))  # type: ignore[arg-type]


def ranks_of(
    monkeypatch: pytest.MonkeyPatch, a: ArchitectureConfig, head: Head, tp: int, pp: int
) -> list[list[StageWeights]]:
    """[pp][tp] ranks; a broadcast reads the same parameter of the source."""
    ranks = [[stage(a, head, Group(t, tp), Group(p, pp)) for t in range(tp)] for p in range(pp)]
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


def read(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_written_is_what_was_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path, tp: int, pp: int
) -> None:
    ranks = ranks_of(monkeypatch, architecture(), LM, tp, pp)
    for rank in (rank for row in ranks for rank in row):
        assert rank.load(open_hf_folder(source)) == []
        assert not any(t.isnan().any() for t in rank.tensors.values())
    target = tmp_path / "target"
    export(monkeypatch, ranks, target, source)
    got, expected = read(target), read(source)
    assert set(got) == set(expected)
    for name in got:
        assert_close(got[name], expected[name], rtol=0, atol=0, msg=name)  # compares dtypes too
    files = sorted(path.name for path in target.iterdir())
    if pp == 1:
        assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    else:
        assert "model.safetensors.index.json" in files
        assert {n for n in got if n in open_hf_folder(target)} == set(expected)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        size = sum(t.numel() * t.element_size() for t in expected.values())
        assert index["metadata"]["total_size"] == size


def test_vocabulary_padding_is_zero(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    ((_, last),) = ranks_of(monkeypatch, architecture(), LM, 2, 1)
    last.load(open_hf_folder(source))
    embedding = last.tensors["embedding.word_embeddings.weight"]
    assert embedding.shape == (4, 8)  # ids 4, 5, 6 and one of padding
    assert embedding[:3].any(dim=1).all() and not embedding[3].any()


def test_a_missing_score_head_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path
) -> None:
    ((rank,),) = ranks_of(monkeypatch, architecture(), SCORE, 1, 1)
    assert rank.load(open_hf_folder(source)) == ["score.weight"]
    assert rank.tensors["score.weight"].isnan().all()
    rank.tensors["score.weight"].data.fill_(0.25)
    export(monkeypatch, [[rank]], tmp_path / "target", source)
    got = read(tmp_path / "target")
    assert "lm_head.weight" not in got and (got["score.weight"] == 0.25).all()
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"} and config["vocab_size"] == 7
