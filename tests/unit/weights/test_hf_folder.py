"""Hugging Face folders: chunks that are read, and errors of folders that cannot be read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.weights.chunks import Chunk, whole
from mindspeed_rlxf.weights.hf_folder import open_hf_folder

TENSORS = {
    "a.weight": torch.arange(12.0).view(4, 3),
    "b.weight": torch.arange(6.0).to(torch.bfloat16),
}


def write_single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_sharded(folder: Path) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_boxes_of_single_and_sharded_folders_are_read(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path)
    folder = open_hf_folder(tmp_path)
    a: Tensor = TENSORS["a.weight"]
    assert_close(folder["a.weight"].read(Chunk((1, 0), (2, 3))), a[1:3])
    assert_close(folder["a.weight"].read(Chunk((0, 2), (4, 1))), a[:, 2:3])
    assert_close(folder["b.weight"].read(Chunk((0,), (6,))), TENSORS["b.weight"])
    assert folder["a.weight"].shape == (4, 3) and folder["b.weight"].dtype == torch.bfloat16
    assert "b.weight" in folder and "c.weight" not in folder


def test_pickled_weights_are_read_where_there_are_no_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        open_hf_folder(tmp_path / "nowhere")
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    folder = open_hf_folder(tmp_path)
    assert set(folder) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(folder[name].read(whole(tuple(tensor.shape))), tensor)


def test_a_truncated_part_of_a_sharded_model(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    part = tmp_path / "model-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:4])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is damaged"):
        open_hf_folder(tmp_path)


UNREADABLE = r"has no readable weight_map .*copy it again"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, UNREADABLE) for text in ("{", "{}", "[]", '{"weight_map": 3}')),
        (
            '{"weight_map": {"a.weight": "model-00001-of-00001"}}',
            "names files that are missing",
        ),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"index\.json {said}"):
        open_hf_folder(tmp_path)
