"""Files of torch.save are written as torch reads them."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from mindspeed_rlxf.weights.boxes import PlannedTensor
from mindspeed_rlxf.weights.legacy import write_torch_file

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
