"""Files of torch.save: read without running them, written as torch reads them."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from mindspeed_rlxf.weights.boxes import Box, whole
from mindspeed_rlxf.weights.planned import PlannedTensor
from mindspeed_rlxf.weights.torch_file import read_torch_file, write_torch_file

TENSORS = {
    "rows": torch.arange(35.0).view(5, 7).to(torch.bfloat16),
    "numbers": torch.arange(6).view(2, 3),
    "empty": torch.zeros(0, 4),
    "vector": torch.tensor([1.5, -2.0, 3.0], dtype=torch.float16),
}


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_what_is_written(tmp_path: Path, mapped: bool) -> None:
    file, told = tmp_path / "x.pt", []
    model = OrderedDict((name, PlannedTensor.of(tensor)) for name, tensor in TENSORS.items())
    write_torch_file(file, {"args": Namespace(tp=2), "model": model}, told.append)
    with torch.serialization.safe_globals([Namespace]):
        got = torch.load(file, weights_only=True, mmap=mapped)
    assert got["args"] == Namespace(tp=2) and list(got["model"]) == list(TENSORS)
    for name, tensor in got["model"].items():
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
        assert tensor.data_ptr() % 64 == 0 or not mapped  # can be mapped as it lies
    assert told == [70, 48, 0, 6]  # bytes


def test_boxes_of_what_torch_wrote_are_read(tmp_path: Path) -> None:
    rows = TENSORS["rows"]
    tree = {
        "plain": rows,
        "turned": rows.t(),
        "part": rows[1:3],
        "parameter": torch.nn.Parameter(rows),
        "deep": rows[:, None].expand(5, 1, 7),
    }
    torch.save(tree, tmp_path / "x.pt")
    got = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(got["plain"].read(Box((1, 2), (3, 3))), rows[1:4, 2:5])
    assert torch.equal(got["turned"].read(Box((2, 1), (3, 3))), rows.t()[2:5, 1:4])
    assert torch.equal(got["part"].read(whole((2, 7))), rows[1:3])
    assert torch.equal(got["parameter"].read(Box((0, 6), (5, 1))), rows[:, 6:])
    assert torch.equal(got["deep"].read(Box((3, 0, 1), (1, 1, 4))), rows[3:4, None, 1:5])


def test_a_file_without_sums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TENSORS, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    got = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(got["rows"].read(whole((5, 7))), TENSORS["rows"])
