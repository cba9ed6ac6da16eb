"""The tensors of files are found in the parameters of transformers' models."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mindspeed_rlxf.models.hf_names import find_pieces, stored_tensors
from tests.distributed.fsdp_models import make_family


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_each_tensor_of_a_file_is_a_view_of_a_parameter(tmp_path: Path, name: str) -> None:
    folder, _, _ = make_family(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    pieces, tensors = find_pieces(model), stored_tensors(model)
    ours = {
        piece.name: piece.view(tensors[parameter])
        for parameter, of_parameter in pieces.items()
        for piece in of_parameter
    }
    stored = load_file(folder / "model.safetensors")
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[key], stored[key]) for key in stored)
