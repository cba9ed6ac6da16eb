"""Hugging Face folders: pickled weights, an index that cannot be used, writing."""

from pathlib import Path

import pytest
import torch

from mindspeed_rlxf.weights.chunks import whole
from mindspeed_rlxf.weights.hf_folder import open_hf_folder, write_stream


def test_pickled_weights_are_read_where_there_are_no_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        open_hf_folder(tmp_path / "nowhere")
    tensors = {"a.weight": torch.arange(12.0).view(4, 3), "b.weight": torch.ones(6).bfloat16()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    folder = open_hf_folder(tmp_path)
    assert set(folder) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(folder[name].read(whole(tuple(tensor.shape))), tensor)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"has no readable weight_map .*copy it again"),
        ('{"weight_map": 3}', r"has no readable weight_map .*copy it again"),
        ('{"weight_map": {"a.weight": "model-00001-of-00001"}}', "names files that are missing"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"index\.json {said}"):
        open_hf_folder(tmp_path)


def test_a_written_tensor_can_be_offloaded(tmp_path: Path) -> None:
    weight = torch.ones(4, 3)
    assert write_stream(iter([("w", weight)]), {"w": (4, 3)}, 4, tmp_path, True) is None
    weight.untyped_storage().resize_(0)  # as `offload` frees a storage
    assert torch.equal(open_hf_folder(tmp_path)["w"].read(whole((4, 3))), torch.ones(4, 3))
