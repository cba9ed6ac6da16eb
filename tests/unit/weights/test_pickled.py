"""Pickled files of checkpoints: their data is read, Megatron is not imported, no code is run."""

import io
import os
import pickle
import random
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from mindspeed_rlxf.weights.pickled import StandIn, read_torch_file
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors


def random_state() -> dict[str, Any]:
    """As Megatron writes it."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def stock_state() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor = torch.ones(3)
    tensor.shared = False  # type: ignore[attr-defined]
    return {
        "args": Namespace(
            params_dtype=torch.bfloat16,
            model_type=ModelType.encoder_or_decoder,
            attention_backend=AttnBackend.auto,
            data_path=[PosixPath("x")],
            spec=SimpleNamespace(a=1),
            device=torch.device("cpu"),
        ),
        "checkpoint_version": 3.0,
        "model": OrderedDict(weight=torch.ones(2, 2, dtype=torch.bfloat16), extra=io.BytesIO()),
        "optimizer": {"main": [[parameter, tensor]], "config": OptimizerConfig(lr=0.1)},
        "rng_state": [random_state()],
        "numbers": (np.float64(2.0), np.int32(3), np.arange(4.0), {1, 2}, frozenset({3}), 1j),
        "names": (b"bytes", bytearray(b"more"), range(3), slice(1, 2), torch.Size([2])),
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_megatron_puts_in_its_files_is_read(tmp_path: Path, is_zip: bool) -> None:
    file = tmp_path / "model_optim_rng.pt"
    torch.save(stock_state(), file, _use_new_zipfile_serialization=is_zip)
    got = read_torch_file(file)
    assert got["args"].state["params_dtype"] is torch.bfloat16
    assert got["args"].state["model_type"].arguments == (1,)
    assert torch.equal(got["model"]["weight"], torch.ones(2, 2).bfloat16())
    parameter, attributed = got["optimizer"]["main"][0]
    assert torch.equal(parameter, torch.ones(2, 2)) and attributed.shape == (3,)
    assert got["names"][0] == b"bytes" and got["names"][4] == (2,)


def test_metadata_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=r"\.metadata (cannot be read|is not as)"):
            read_metadata_tensors(folder)


def test_an_old_torch_reads_pickled_files_only_where_they_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ValueError, match=r"CVE-2026-24747.*torch 2\.10 or newer.*trust_files"):
        read_torch_file(tmp_path / "x.pt")
    assert read_torch_file(tmp_path / "x.pt", trust_files=True)["a"] == 1
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert read_torch_file(tmp_path / "x.pt")["a"] == 1


def test_a_file_in_a_file_stays_bytes(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "mark"),)

    inner = io.BytesIO(pickle.dumps(Runs()))
    torch.save({"_extra_state": inner}, tmp_path / "common.pt")
    got = read_torch_file(tmp_path / "common.pt")["_extra_state"]
    assert isinstance(got, StandIn) and (got.state or got.arguments)[0] == inner.getvalue()
    assert not (tmp_path / "mark").exists()
