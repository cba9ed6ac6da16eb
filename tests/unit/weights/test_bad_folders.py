"""Megatron folders that are damaged, incomplete, or hold another model."""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.formats import Format, find_weights
from tests.unit.weights.folders_of import architecture_of, assert_same, make_folder, read_folder


def converted(tmp_path: Path, *options: str) -> Path:
    make_folder(tmp_path / "hf", "llama")
    assert main([str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg", *options]) == 0
    return tmp_path / "mg"


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    return converted(tmp_path, "--tp", "2")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return converted(tmp_path, "--format", "torch_dist")


def rank_file(folder: Path, rank: str = "mp_rank_00") -> Path:
    return folder / "iter_0000001" / rank / "model_optim_rng.pt"


def refused(folder: Path, capsys: Any, *options: str) -> str:
    """The error of a conversion of the folder back to Hugging Face."""
    capsys.readouterr()
    assert main([str(folder), str(folder.parent / "back"), "--to", "hf", *options]) == 2
    assert not (folder.parent / "back").exists()
    return str(capsys.readouterr().err)


def change(file: Path, change_name: Callable[[str], str] = str, **tensors: Tensor | None) -> None:
    """Rewrite a rank's file with other names, and other tensors; None takes one away."""
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(file, weights_only=True)
    model = {change_name(name): tensor for name, tensor in content["model"].items()}
    model |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = OrderedDict((name, tensor) for name, tensor in model.items() if tensor is not None)
    torch.save({**content, "model": kept}, file)


def test_other_shapes_missing_and_unknown_names_are_all_listed(legacy: Path, capsys: Any) -> None:
    change(
        rank_file(legacy),
        decoder__final_layernorm__weight=torch.zeros(8),
        decoder__layers__0__mlp__linear_fc2__weight=None,
        decoder__layers__1__mlp__linear_fc2__bias=torch.zeros(16),
    )
    said = refused(legacy, capsys)
    assert "decoder.final_layernorm.weight is [8], the model needs [16]" in said
    assert "decoder.layers.0.mlp.linear_fc2.weight is missing" in said
    assert "mp_rank_00: decoder.layers.1.mlp.linear_fc2.bias is not in the model" in said


def test_truncated_and_missing_files_of_ranks_are_named(legacy: Path, capsys: Any) -> None:
    file = rank_file(legacy, "mp_rank_01")
    file.write_bytes(file.read_bytes()[:-300])
    assert "mp_rank_01/model_optim_rng.pt cannot be read" in refused(legacy, capsys)
    file.unlink()
    assert "mp_rank_01/model_optim_rng.pt cannot be read" in refused(legacy, capsys)
    file.parent.rmdir()
    rank_file(legacy).parent.rename(file.parent)
    assert "lacks ranks: tp 0 pp 0 ep 0; copy the whole folder" in refused(legacy, capsys)


def test_layers_with_fused_norms_are_read_too(legacy: Path, tmp_path: Path) -> None:
    """Transformer Engine's names, and the extra states that it leaves."""

    def rename(name: str) -> str:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")

    state = {"decoder__layers__0__mlp__linear_fc1___extra_state": torch.zeros(1)}
    for rank in ("mp_rank_00", "mp_rank_01"):
        change(rank_file(legacy, rank), rename, **state)
    assert main([str(legacy), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert_same(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


def test_a_dropped_bias_of_a_reward_head_is_reported(tmp_path: Path, capsys: Any) -> None:
    make_folder(tmp_path / "hf", "llama", Head.SCORE)
    assert main([str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg"]) == 0
    change(rank_file(tmp_path / "mg"), rm_head__bias=torch.tensor([0.75]))
    assert main([str(tmp_path / "mg"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert "note: the bias 0.75 of the reward head is dropped" in capsys.readouterr().out


def test_heads_that_are_not_asked_for_are_refused(tmp_path: Path, capsys: Any) -> None:
    make_folder(tmp_path / "hf", "llama", Head.SCORE)
    make_folder(tmp_path / "lm", "llama")
    assert main([str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg", "--orm"]) == 0
    said = refused(tmp_path / "mg", capsys, "--hf-config", str(tmp_path / "lm"))
    assert "holds a reward model; add --orm" in said
    assert main([str(tmp_path / "lm"), str(tmp_path / "x"), "--to", "mg", "--orm"]) == 2
    assert "holds no score head; leave --orm out" in capsys.readouterr().err


def test_tensors_that_would_be_lost_are_refused(tmp_path: Path, capsys: Any) -> None:
    make_folder(tmp_path / "hf", "qwen2")
    make_folder(tmp_path / "llama", "llama")
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg"]
    assert main([*arguments, "--hf-config", str(tmp_path / "llama")]) == 2
    assert "model.layers.0.self_attn.q_proj.bias is not in the model" in capsys.readouterr().err


def test_weights_are_found_by_the_tracker_or_in_the_only_iteration(legacy: Path) -> None:
    iteration = legacy / "iter_0000001"
    assert find_weights(legacy) == find_weights(iteration) == (Format.LEGACY, iteration)
    (legacy / "latest_checkpointed_iteration.txt").unlink()
    assert find_weights(legacy) == (Format.LEGACY, iteration)
    (legacy / "iter_0000002").mkdir()
    with pytest.raises(ValueError, match=r"holds iter_0000001, iter_0000002 and no latest_check"):
        find_weights(legacy)
    (legacy / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"names '7', and .*iter_0000007 is not there"):
        find_weights(legacy)
    iteration.rename(legacy / "release")
    (legacy / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert find_weights(legacy) == (Format.LEGACY, legacy / "release")


def test_a_sharded_checkpoint_without_its_files(sharded: Path, capsys: Any) -> None:
    iteration = sharded / "iter_0000001"
    data = iteration / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing or truncated"):
        open_weights(sharded, architecture_of("llama"))
    data.unlink()
    assert "__0_0.distcp is missing" in refused(sharded, capsys)
    data.write_bytes(whole)
    metadata = iteration / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:100])
    assert ".metadata cannot be read" in refused(sharded, capsys)


def test_a_sharded_checkpoint_of_another_model(sharded: Path, capsys: Any) -> None:
    for keys, expected in (
        ({"num_layers": 2}, "decoder.layers.2.mlp.linear_fc1.weight is not in the model"),
        ({"num_layers": 6}, "decoder.layers.4.input_layernorm.weight is missing"),
        (
            {"hidden_size": 8},
            "embedding.word_embeddings.weight is [37, 16], the model needs [37, 8]",
        ),
        ({"vocab_size": 40}, "has 37 rows, the model needs 40"),
    ):
        other = sharded.parent / f"other{len(str(keys))}{next(iter(keys.values()))}"
        make_folder(other, "llama", **keys)
        assert expected in refused(sharded, capsys, "--hf-config", str(other))
