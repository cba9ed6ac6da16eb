"""Conversions from Hugging Face to every layout and back keep every bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights import tensor_conversion as module
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.pickled import read_torch_file
from tests.unit.weights.folders_of import (
    FAMILIES,
    architecture_of,
    assert_same,
    make_folder,
    read_folder,
)

LAYOUTS = {
    "tp1": [],
    "tp8": ["--tp", "8"],  # two ranks share each of four query groups
    "tp4-pp2": ["--tp", "4", "--pp", "2"],
    "uneven": ["--tp", "2", "--pp", "3", "--num-layer-list", "1,1,2"],
    "vpp": ["--tp", "2", "--pp", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    "vocab128": ["--tp", "2", "--make-vocab-size-divisible-by", "128"],
}
EXPERT_LAYOUTS = {
    "ep2": ["--ep", "2"],
    "tp2-pp2-ep2": ["--tp", "2", "--pp", "2", "--ep", "2"],
    "vpp-ep4": ["--pp", "2", "--ep", "4", "--num-layers-per-virtual-pipeline-stage", "1"],
}
ONE_OF = 3  # cases of a family that the short tests have


def cases() -> Iterator[Any]:
    """Each family in each layout and format; the short tests have every family."""
    for number, (family, keys) in enumerate((FAMILIES | {"score": {}}).items()):
        layouts = LAYOUTS | (EXPERT_LAYOUTS if "num_experts" in keys else {})
        for place, layout in enumerate(layouts):
            marks = [] if (number + place) % ONE_OF == 0 else [pytest.mark.long]
            for kind in ("torch", "torch_dist"):
                yield pytest.param(family, layout, kind, marks=marks)


def run(*arguments: Any) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.mark.parametrize(("family", "layout", "kind"), cases())
def test_a_model_comes_back_bit_by_bit(tmp_path: Path, family: str, layout: str, kind: str) -> None:
    scored = family == "score"
    head, orm = (Head.SCORE, ["--orm"]) if scored else (Head.LANGUAGE_MODEL, [])
    tensors = make_folder(tmp_path / "hf", "llama" if scored else family, head)
    options = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    run(tmp_path / "hf", tmp_path / "mg", "--to", "mg", "--format", kind, *options, *orm)
    run(tmp_path / "mg", tmp_path / "back", "--to", "hf", *orm)
    assert_same(read_folder(tmp_path / "back"), tensors)
    for name in ("config.json", "tokenizer.json"):
        before, after = (json.loads((tmp_path / at / name).read_text()) for at in ("hf", "back"))
        added = {"num_labels", "id2label", "label2id"} if scored else set()
        assert {key: value for key, value in after.items() if key not in added} == before


@pytest.mark.parametrize(("first", "second"), [("torch", "torch_dist"), ("torch_dist", "torch")])
def test_a_megatron_folder_is_split_again(
    tmp_path: Path, first: str, second: str, capsys: Any
) -> None:
    tensors = make_folder(tmp_path / "hf", "qwen3_moe", shards=3)
    run(tmp_path / "hf", tmp_path / "a", "--to", "mg", "--format", first, "--tp", 8, "--ep", 2)
    # Four groups; a sharded checkpoint is not bound to ranks.
    assert ("megatron-core 0.16 or newer" in capsys.readouterr().out) == (first == "torch")
    run(tmp_path / "a", tmp_path / "b", "--to", "mg", "--format", second, "--tp", 2, "--pp", 2)
    assert "megatron-core" not in capsys.readouterr().out
    run(tmp_path / "b", tmp_path / "back", "--to", "hf", "--shard-size-gb", 1e-5)
    assert_same(read_folder(tmp_path / "back"), tensors)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == size
    assert list(open_weights(tmp_path / "back", architecture_of("qwen3_moe"))) == list(tensors)


def test_ranks_of_experts_and_of_the_pipeline_are_named_as_in_megatron(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "mixtral")
    folders = {}
    for name, options in {"tp": [], "pp": ["--pp", 2], "ep": ["--ep", 2]}.items():
        run(tmp_path / "hf", tmp_path / name, "--to", "mg", "--tp", 2, *options)
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "1"
        iteration = tmp_path / name / "iter_0000001"
        folders[name] = sorted(p.parent.name for p in iteration.rglob("model_optim_rng.pt"))
    assert folders["tp"] == ["mp_rank_00", "mp_rank_01"]
    both = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    assert folders["pp"] == folders["ep"] == both
    run(tmp_path / "tp", tmp_path / "all", "--to", "mg", "--pp", 2, "--ep", 2)
    assert (tmp_path / "all/iter_0000001/mp_rank_00_001_001/model_optim_rng.pt").exists()


def test_a_virtual_pipeline_has_a_key_for_each_chunk(tmp_path: Path) -> None:
    """4 layers, 2 ranks, chunks of 1: rank 0 holds layers 0 and 2, rank 1 layers 1 and 3."""
    tensors = make_folder(tmp_path / "hf", "llama")
    run(tmp_path / "hf", tmp_path / "mg", "--to", "mg", *LAYOUTS["vpp"][2:])
    content = read_torch_file(tmp_path / "mg/iter_0000001/mp_rank_00_001/model_optim_rng.pt")
    assert {key for key in content if key.startswith("model")} == {"model0", "model1"}
    name = "decoder.layers.0.pre_mlp_layernorm.weight"
    for key, layer in (("model0", 1), ("model1", 3)):
        expected = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
        assert torch.equal(content[key][name], expected)
    assert [key for key in ("model0", "model1") if "output_layer.weight" in content[key]] == [
        "model1"
    ]


def test_params_dtype_casts_every_tensor_and_says_so_in_config_json(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path / "hf", "llama")
    run(tmp_path / "hf", tmp_path / "mg", "--to", "mg", "--params-dtype", "fp16")
    run(tmp_path / "mg", tmp_path / "back", "--to", "hf")
    expected = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    assert_same(read_folder(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "float16"


def test_options_of_the_older_tool_write_to_its_folders(tmp_path: Path, capsys: Any) -> None:
    tensors = make_folder(tmp_path / "hf", "qwen2")
    shared = ["--use-mcore-models", "--model-type", "GPT", "--model-type-hf", "llama2"]
    shared += ["--add-qkv-bias"]
    sizes = ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "2"]
    folders = ["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg")]
    there = ["--load-model-type", "hf", "--save-model-type", "mg", "--tokenizer-model", "x.json"]
    run(*shared, *there, *sizes, *folders)
    said = capsys.readouterr().err
    assert "note: flags without effect: --model-type (GPT is the only one), " in said
    assert ", --use-mcore-models (always)" in said
    back = ["--load-model-type", "mg", "--save-model-type", "hf"]
    run(*shared, *back, "--load-dir", tmp_path / "mg", "--save-dir", tmp_path / "hf")
    assert_same(read_folder(tmp_path / "hf" / "mg2hf"), tensors)


def test_a_folder_that_is_there_is_replaced_with_force_only(tmp_path: Path, capsys: Any) -> None:
    make_folder(tmp_path / "hf", "llama")
    run(tmp_path / "hf", tmp_path / "mg", "--to", "mg")
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg", "--tp", "2"]
    assert main(arguments) == 2
    assert "mg must not exist yet; give another folder, or --force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert (tmp_path / "mg/iter_0000001/mp_rank_01").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]


def test_a_full_disk_or_an_interrupt_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    make_folder(tmp_path / "hf", "llama")
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg"]
    usage = type("Usage", (), {"free": 10})
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda path: usage)
        assert main(arguments) == 2
    assert "its disk has 0.00 GB free; free some space" in capsys.readouterr().err

    monkeypatch.setattr(module, "copy_side_files", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(arguments) == 75
    assert "interrupted; run the same command again" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
