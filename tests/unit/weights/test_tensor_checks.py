"""Folders whose tensors are not a model's weights are refused, by every reader."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.config.roles import RoleConfig
from mindspeed_rlxf.engine.fsdp.weights import check_folder, plain_names
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.chunks import StoredTensor
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.tensor_checks import tensor_problems, tied_names
from tests.distributed.fsdp_models import make_family
from tests.unit.weights.folders_of import architecture_of, make_folder
from tests.unit.weights.test_bad_folders import change, rank_file

NAME = "model.layers.0.mlp.down_proj.weight"


def block_fp8(weight: Tensor) -> dict[str, Tensor]:
    return {NAME: weight.to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.ones(1, 1)}


def int8_with_scales(weight: Tensor) -> dict[str, Tensor]:
    return {NAME: weight.to(torch.int8), f"{NAME}_scale": torch.ones(len(weight), 1)}


def bitsandbytes_int8(weight: Tensor) -> dict[str, Tensor]:
    scales = {NAME.replace("weight", "SCB"): torch.ones(len(weight))}
    return {NAME: weight.to(torch.int8), **scales}


def bitsandbytes_nf4(weight: Tensor) -> dict[str, Tensor]:
    packed = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
    return {NAME: packed, f"{NAME}.absmax": torch.ones(4)}


def fp8_without_scales(weight: Tensor) -> dict[str, Tensor]:
    return {NAME: weight.to(torch.float8_e5m2)}


def scaled_bf16(weight: Tensor) -> dict[str, Tensor]:
    return {NAME: weight, f"{NAME}_scale": torch.ones(1)}


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def problems_of(folder: Path, family: str, head: Head = Head.LANGUAGE_MODEL) -> list[str]:
    architecture = architecture_of(family)
    weights = open_weights(folder, architecture)
    shapes, tied = hf_shapes(architecture, head), tied_names(architecture, head)
    return tensor_problems(folder, weights, shapes, head, tied)


def fsdp_problem(folder: Path, head: Head = Head.LANGUAGE_MODEL) -> str:
    try:
        check_folder(
            RoleConfig(model="", architecture=architecture_of("llama"), load=str(folder)), head
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("quantize", [
    block_fp8, int8_with_scales, bitsandbytes_int8, bitsandbytes_nf4, fp8_without_scales,
    scaled_bf16,
])  # fmt: skip
def test_quantized_weights_are_refused(tmp_path: Path, quantize: Any, capsys: Any) -> None:
    add(tmp_path / "lm", quantize(make_folder(tmp_path / "lm", "llama")[NAME].contiguous()))
    with pytest.raises(ValueError, match="quantized"):
        problems_of(tmp_path / "lm", "llama")
    assert "quantized" in fsdp_problem(tmp_path / "lm")
    assert main([str(tmp_path / "lm"), str(tmp_path / "mg"), "--to", "mg"]) == 2
    assert "quantized" in capsys.readouterr().err


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_model_has_no_other_output_layer(
    tmp_path: Path, is_equal: bool, capsys: Any
) -> None:
    embedding = make_folder(tmp_path / "lm", "tied")["model.embed_tokens.weight"]
    add(tmp_path / "lm", {"lm_head.weight": (embedding if is_equal else embedding + 1).clone()})
    if is_equal:
        assert problems_of(tmp_path / "lm", "tied") == []
    else:
        with pytest.raises(ValueError, match="tie_word_embeddings"):
            problems_of(tmp_path / "lm", "tied")
    assert ("tie_word_embeddings" in fsdp_problem(tmp_path / "lm")) is not is_equal
    assert (main([str(tmp_path / "lm"), str(tmp_path / "mg"), "--to", "mg"]) == 0) is is_equal
    assert problems_of(tmp_path / "lm", "tied", Head.SCORE) == ["score.weight is missing"]


@pytest.mark.parametrize("pp", ["1", "2"])
def test_a_tied_megatron_checkpoint_has_no_other_output_layer(tmp_path: Path, pp: str) -> None:
    embedding = make_folder(tmp_path / "hf", "tied")["model.embed_tokens.weight"]
    assert main([str(tmp_path / "hf"), str(tmp_path / "mg"), "--to", "mg", "--pp", pp]) == 0
    last = rank_file(tmp_path / "mg", "mp_rank_00" if pp == "1" else "mp_rank_00_001")
    assert problems_of(tmp_path / "mg", "tied") == []
    change(last, output_layer__weight=embedding)
    assert problems_of(tmp_path / "mg", "tied") == []
    change(last, output_layer__weight=embedding + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        problems_of(tmp_path / "mg", "tied")


def test_tensors_beside_the_weights_are_permitted_by_name(tmp_path: Path) -> None:
    make_folder(tmp_path / "lm", "llama")
    beside = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "model.position_ids": torch.arange(64),
        "score.weight": torch.ones(1, 16),
        "mtp.fc.weight": torch.ones(16, 32),
    }
    add(tmp_path / "lm", beside)
    assert problems_of(tmp_path / "lm", "llama") == []
    assert problems_of(tmp_path / "lm", "llama", Head.SCORE) == []
    assert fsdp_problem(tmp_path / "lm") == fsdp_problem(tmp_path / "lm", Head.SCORE) == ""
    add(tmp_path / "lm", {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)})
    rule = "model.layers.0.self_attn.q_proj.bias is not in the model"
    assert problems_of(tmp_path / "lm", "llama") == [rule]
    assert rule in fsdp_problem(tmp_path / "lm")


def test_a_model_that_sees_images_may_have_its_other_parts() -> None:
    held = ("model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight")
    folder = {name: StoredTensor(name, torch.float32, (1,), []) for name in held}
    assert [*plain_names(folder)] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("count", [0, 1])
def test_layers_that_predict_further_tokens_stand_behind_the_others(
    tmp_path: Path, count: int
) -> None:
    lm, _, _ = make_family(tmp_path, "deepseek_v3")
    config = json.loads((lm / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (lm / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    name = "model.layers.2.eh_proj.weight"
    add(lm, {name: torch.ones(2, 2)})
    assert (f"{name} is not in the model" in fsdp_problem(lm)) is (count == 0)
