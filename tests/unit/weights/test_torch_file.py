"""Files of torch.save: read without running them, written as torch reads them."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf.weights.boxes import Box, whole
from mindspeed_rlxf.weights.inert_pickle import read_pickle
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


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Payload.folder),)

    folder: Path


def test_a_file_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    Payload.folder = tmp_path / "made"
    torch.save({"model": TENSORS, "bad": Payload()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"must hold nothing but .* it wants posix\.mkdir"):
        read_torch_file(tmp_path / "x.pt")
    assert not Payload.folder.exists()
    pickle.loads(pickle.dumps(Payload()))
    assert Payload.folder.exists(), "the payload works where it is let"


def test_objects_of_any_class_do_not_stop_the_reading(tmp_path: Path) -> None:
    state = np.random.default_rng(0).bit_generator.state
    other = {
        "path": Path("x"),
        "array": np.zeros(3),
        "state": state,
        "set": {1, 2},
        "dtype": torch.half,
    }
    torch.save({**other, "model": TENSORS}, tmp_path / "x.pt")
    got = read_torch_file(tmp_path / "x.pt")
    assert got["dtype"] is torch.float16
    assert torch.equal(got["model"]["numbers"].read(whole((2, 3))), TENSORS["numbers"])


@pytest.mark.parametrize("cut", [1, 200, 1000])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    torch.save(TENSORS, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:-cut])
    with pytest.raises(ValueError, match=r"x\.pt is no file of torch\.save, or is truncated"):
        read_torch_file(tmp_path / "x.pt")


def flip(file: Path, tensor: torch.Tensor) -> None:
    """One bit of the file's only copy of the tensor's bytes."""
    data, part = bytearray(file.read_bytes()), tensor.view(torch.uint8).numpy().tobytes()
    assert data.count(part) == 1
    data[data.index(part) + len(part) // 2] ^= 1
    file.write_bytes(data)


def test_changed_bytes_of_a_tensor_are_seen_when_it_is_read(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", TENSORS["rows"])
    got = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(got["vector"].read(whole((3,))), TENSORS["vector"])
    with pytest.raises(ValueError, match=r"x\.pt: the bytes of .*data/0 are not those .* copy it"):
        got["rows"].read(whole((1, 1)))


def test_a_file_without_sums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TENSORS, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    got = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(got["rows"].read(whole((5, 7))), TENSORS["rows"])


def test_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone is missing; copy the whole folder again"):
        read_torch_file(tmp_path / "gone")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty cannot be read"):
        read_torch_file(tmp_path / "empty")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"garbage", b"\x80\x02}q\x00("])
def test_a_damaged_pickle_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="damaged pickle"):
        read_pickle(data)
