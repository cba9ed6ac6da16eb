"""The reader of checkpoints runs no code of them, and refuses files that hold more than data."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import re
import struct
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
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mindspeed_rlxf.weights.boxes import whole
from mindspeed_rlxf.weights.dist_metadata import open_torch_dist
from mindspeed_rlxf.weights.inert_pickle import read_pickle
from mindspeed_rlxf.weights.pickle_names import Inert
from mindspeed_rlxf.weights.torch_file import StoredTensor, read_torch_file

MARK = "mark"  # folder that a payload makes where it is run


class Runs:
    """Pickled, it calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


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


def test_what_megatron_puts_in_its_files_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model_optim_rng.pt"
    torch.save(stock_state(), file)
    got = read_torch_file(file)
    assert got["args"].field("params_dtype") is torch.bfloat16
    assert torch.equal(got["model"]["weight"].read(whole((2, 2))), torch.ones(2, 2).bfloat16())
    parameter, attributed = got["optimizer"]["main"][0]
    assert type(parameter) is type(attributed) is StoredTensor and attributed.shape == (3,)
    assert got["names"][0] == b"bytes" and got["names"][4] == (2,)


def distributed(folder: Path, *saved: Any) -> Path:
    """A `torch_dist` checkpoint of these objects, as torch.distributed.checkpoint writes it."""
    places, described, data = {}, {}, b""
    for number, item in enumerate(saved):
        stream = io.BytesIO()
        torch.save(item, stream)
        name = f"item{number}"
        described[name] = (
            dcp.TensorStorageMetadata(
                dcp.TensorProperties(item.dtype),
                item.shape,
                [dcp.ChunkStorageMetadata(torch.Size([0]), item.shape)],
            )
            if isinstance(item, torch.Tensor)
            else dcp.BytesStorageMetadata()
        )
        info = _StorageInfo("__0_0.distcp", len(data), len(stream.getvalue()))
        offset = torch.Size([0]) if isinstance(item, torch.Tensor) else None
        places[dcp.MetadataIndex(name, offset)] = info
        data += stream.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    write_metadata(folder, dcp.Metadata(described, storage_data=places))
    return folder


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_torch_distributed_checkpoint_writes_passes(tmp_path: Path) -> None:
    found = open_torch_dist(distributed(tmp_path, torch.ones(4), random_state(), [None]))
    assert list(found.names()) == ["item0"] and len(found.objects) == 2
    assert found.tensor("item0").size == (4,)


def test_a_function_in_a_torch_file_is_named_and_not_called(tmp_path: Path) -> None:
    bad = {"args": Namespace(), "x": Runs(os.mkdir, str(tmp_path / MARK))}
    torch.save(bad, tmp_path / "common.pt")
    with pytest.raises(
        ValueError, match=r"common\.pt must hold nothing but .* it has posix\.mkdir"
    ):
        read_torch_file(tmp_path / "common.pt")
    assert not (tmp_path / MARK).exists()
    torch.load(tmp_path / "common.pt", weights_only=False)
    assert (tmp_path / MARK).exists(), "the payload works where it is let"


def test_a_function_in_an_object_inside_a_distcp_file_is_named(tmp_path: Path) -> None:
    distributed(tmp_path, torch.ones(4), Runs(os.mkdir, str(tmp_path / MARK)))
    with pytest.raises(ValueError, match=r"__0_0\.distcp must .* it has posix\.mkdir"):
        open_torch_dist(tmp_path)
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "mp_rank_00/model_optim_rng.pt",
            r"keep its model alone, .*: python -c \"import sys.*\.pt",
        ),
        (
            "common.pt",
            r"take that out and save it again, .*: torch\.load\(file, weights_only=False",
        ),
        (".metadata", r"save the checkpoint again without that, "),
    ],
)
def test_a_refusal_says_how_to_save_the_file_again(tmp_path: Path, name: str, remedy: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if name == ".metadata":
        write_metadata(tmp_path, Runs(os.system, "true"))
    else:
        torch.save(Runs(os.system, "true"), file)
    rule = r"it has posix\.system; do not open a file of others\. Where you made it, "
    with pytest.raises(ValueError, match=rule) as e:
        open_torch_dist(tmp_path) if name == ".metadata" else read_torch_file(file)
    assert re.search(remedy, str(e.value)) and "in the environment that wrote it" in str(e.value)


def test_a_file_in_a_file_stays_bytes(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(Runs(os.mkdir, str(tmp_path / MARK)), inner)
    torch.save({"_extra_state": inner}, tmp_path / "common.pt")
    got = read_torch_file(tmp_path / "common.pt")["_extra_state"]
    assert type(got) is Inert and (got.state or got.arguments)[0] == inner.getvalue()
    assert not (tmp_path / MARK).exists()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


MKDIR_BY_MEMO = (
    b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x94" + b"h\x00h\x01\x93" + b"."
)
NAMESPACE = text("argparse") + text("Namespace") + b"\x93"
GETATTR = b"\x80\x04" + text("builtins") + text("getattr") + b"\x93" + b"."
NAME_OF_A_CALL = (  # the name would come out of a call of an allowed function
    b"\x80\x04" + text("_codecs") + text("encode") + b"\x93" + text("posix") + text("latin1")
    + b"\x86R" + text("system") + b"\x93."
)  # fmt: skip
SYSTEM = b"cos\nsystem\n(S'true'\ntR."
HOSTILE = {
    "names from the memo": (MKDIR_BY_MEMO, r"posix\.system"),
    "getattr": (GETATTR, r"builtins\.getattr"),
    "dotted name": (b"\x80\x04" + text("torch") + text("os.system") + b"\x93.", r"torch\.os"),
    "name that is computed": (NAME_OF_A_CALL, "STACK_GLOBAL requires str"),
    "old opcode INST": (b"(S'true'\nios\nsystem\n.", "the operation 0x53"),
    "old opcode OBJ": (b"(cos\nsystem\nS'true'\no.", r"os\.system"),
    "Python 2 name": (b"\x80\x02c__builtin__\neval\n.", r"__builtin__\.eval"),
    "persistent id": (b"\x80\x02" + text("x") + b"Q.", "a reference to something outside, x"),
    "attributes of a class": (
        b"\x80\x04" + NAMESPACE + b"N}" + text("__eq__") + b"\x88s\x86b.",
        r"new attributes for the class argparse\.Namespace",
    ),
    "arguments of a class": (b"\x80\x04" + NAMESPACE + b"K\x01\x85R.", r"Namespace with arguments"),
    "special attribute": (
        b"\x80\x04" + NAMESPACE + b")R}" + text("__class__") + b"\x88sb.",
        "argparse.Namespace with a state",
    ),
    "attributes by slots": (
        b"\x80\x04" + NAMESPACE + b")RN}" + text("__class__") + b"\x88s\x86b.",
        "argparse.Namespace with a state",
    ),
    "call of an object": (b"\x80\x04" + NAMESPACE + b")R)R.", "call of what argparse.Namespace"),
    "codec": (
        b"\x80\x02c_codecs\nencode\n" + text("x") + text("idna") + b"\x86R.",
        r"_codecs\.encode with arguments",
    ),
    "array of objects": (
        b"\x80\x02cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87R.",
        r"numpy\.dtype with arguments",
    ),
    "tensor without storage": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00))\x89}tR.",
        r"_rebuild_tensor_v2 with arguments",
    ),
    "storage that is called": (b"\x80\x02ctorch\nFloatStorage\n)R.", "a storage that is made"),
    "tensor of another function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nctorch\nTensor\n)NtR.",
        "_rebuild_from_type_v2 with arguments",
    ),
    "cut": (b"\x80\x04" + NAMESPACE, "damaged pickle: it ends early"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(ValueError, match=reason):
        read_pickle(data)


def test_an_extension_of_this_process_is_not_taken(tmp_path: Path) -> None:
    copyreg.add_extension("posix", "system", 250)
    try:
        assert pickle.loads(b"\x80\x02\x82\xfa.") is os.system  # fills Python's cache
        with pytest.raises(ValueError, match="the operation 0x82"):
            read_pickle(b"\x80\x02\x82\xfa.")
    finally:
        copyreg.remove_extension("posix", "system", 250)


def test_metadata_that_names_a_file_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What unpickles it sets slots after attributes."""
    data = pickle.dumps(Runs(os.system, "true"))
    (tmp_path / "good.distcp").write_bytes(pickle.dumps({}).ljust(len(data), b"."))
    (tmp_path / "evil.distcp").write_bytes(data)
    place = _StorageInfo("good.distcp", 0, len(data))
    slots = {"relative_path": "evil.distcp"}
    with monkeypatch.context() as patch:
        patch.setattr(_StorageInfo, "__getstate__", lambda self: (vars(self), slots), raising=False)
        write_metadata(tmp_path, dcp.Metadata({}, storage_data={dcp.MetadataIndex("a"): place}))
    with pytest.raises(ValueError, match="two attributes of one name"):
        open_torch_dist(tmp_path)


def test_missing_metadata_and_metadata_of_another_kind_are_named(tmp_path: Path) -> None:
    write_metadata(tmp_path, {"no": "metadata"})
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
            open_torch_dist(folder)


def test_links_inside_pass_and_links_out_are_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other.distcp"
    folder.mkdir()
    file = distributed(folder, torch.ones(4)) / "__0_0.distcp"
    file.rename(folder / "real")
    file.symlink_to("real")
    open_torch_dist(folder)
    file.unlink()
    (folder / "real").rename(other)
    file.symlink_to(other)
    with pytest.raises(ValueError, match=r"__0_0\.distcp must not lead out .* link to .*other"):
        open_torch_dist(folder)
