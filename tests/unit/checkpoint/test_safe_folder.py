"""Checkpoint folders that could run code, or lead elsewhere, are refused before they are opened."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
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

from mindspeed_rlxf.checkpoint.inert_pickle import read_pickle
from mindspeed_rlxf.checkpoint.safe_folder import check, check_file

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


@pytest.mark.parametrize("zipped", [True, False])
def test_what_megatron_puts_in_its_files_passes(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    torch.save(stock_state(), file, _use_new_zipfile_serialization=zipped)
    check(tmp_path)


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
        places[dcp.MetadataIndex(name)] = info
        data += stream.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    write_metadata(folder, dcp.Metadata(described, storage_data=places))
    return folder


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_torch_distributed_checkpoint_writes_passes(tmp_path: Path) -> None:
    check(distributed(tmp_path, torch.ones(4), random_state(), [None]))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_function_in_a_torch_file_is_named_and_not_called(tmp_path: Path, zipped: bool) -> None:
    bad = {"args": Namespace(), "x": Runs(os.mkdir, str(tmp_path / MARK))}
    torch.save(bad, tmp_path / "common.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"common\.pt must hold nothing but .* wants posix\.mkdir"):
        check(tmp_path)
    assert not (tmp_path / MARK).exists()
    torch.load(tmp_path / "common.pt", weights_only=False)
    assert (tmp_path / MARK).exists(), "the payload works where it is let"


def test_a_function_in_the_metadata_is_named(tmp_path: Path) -> None:
    write_metadata(tmp_path, Runs(os.mkdir, str(tmp_path / MARK)))
    with pytest.raises(ValueError, match=r"\.metadata must .* wants posix\.mkdir"):
        check(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_a_function_in_an_object_inside_a_distcp_file_is_named(tmp_path: Path) -> None:
    distributed(tmp_path, torch.ones(4), Runs(os.mkdir, str(tmp_path / MARK)))
    with pytest.raises(ValueError, match=r"__0_0\.distcp must .* wants posix\.mkdir"):
        check(tmp_path)
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
def test_whoever_made_a_refused_file_is_told_how_to_save_it_again(
    tmp_path: Path, name: str, remedy: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if name == ".metadata":
        write_metadata(tmp_path, Runs(os.system, "true"))
    else:
        torch.save(Runs(os.system, "true"), file)
    with pytest.raises(
        ValueError, match=r"do not open a file of others\. Where you made it, "
    ) as e:
        check(tmp_path)
    assert re.search(remedy, str(e.value)) and "in the environment that wrote it" in str(e.value)


def test_every_bad_file_is_named_whatever_its_name_and_depth(tmp_path: Path) -> None:
    for name in ("a/rng_state/shard_0_1.pt", "b/notes.txt", "c.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(Runs(os.system, "true"), tmp_path / name)
    with pytest.raises(ValueError, match=r"(?s)c\.bin.*shard_0_1\.pt.*notes\.txt") as caught:
        check(tmp_path)
    assert str(caught.value).count("posix.system") == 3


def test_a_pickle_in_a_file_in_memory_is_scanned_too(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(Runs(os.system, "true"), inner)
    torch.save({"_extra_state": inner}, tmp_path / "common.pt")
    with pytest.raises(ValueError, match=r"posix\.system"):
        check(tmp_path)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


MKDIR_BY_MEMO = (
    b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x94" + b"00h\x00h\x01\x93" + b"."
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
    "old opcode INST": (b"(S'true'\nios\nsystem\n.", r"os\.system"),
    "old opcode OBJ": (b"(cos\nsystem\nS'true'\no.", r"os\.system"),
    "Python 2 name": (b"\x80\x02c__builtin__\neval\n.", r"__builtin__\.eval"),
    "persistent id": (b"\x80\x02" + text("x") + b"Q.", "a reference to something outside, x"),
    "attributes of a class": (
        b"\x80\x04" + NAMESPACE + b"N}" + text("__eq__") + b"\x88s\x86b.",
        "new attributes for the class Namespace",
    ),
    "arguments of a class": (b"\x80\x04" + NAMESPACE + b"I1\n\x85R.", r"Namespace with arguments"),
    "special attribute": (
        b"\x80\x04" + NAMESPACE + b")R}" + text("__class__") + b"\x88sb.",
        "argparse.Namespace with a state",
    ),
    "attributes by slots": (
        b"\x80\x04" + NAMESPACE + b")RN}" + text("__class__") + b"\x88s\x86b.",
        "argparse.Namespace with a state",
    ),
    "a file in memory, as an argument": (
        b"\x80\x02c_io\nBytesIO\nC" + bytes([len(SYSTEM)]) + SYSTEM + b"\x85R.",
        r"os\.system",
    ),
    "a state that hides the arguments": (
        b"\x80\x02ctorch\ndevice\n" + text("cpu") + b"\x85R}" + text("arguments") + b"K\x01sb.",
        "a state that hides what it is made of",
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
    "cut": (b"\x80\x04" + NAMESPACE, "cannot be read: damaged pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(tmp_path: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        check(tmp_path)


def test_hooks_of_a_tensor_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    torch.save({"x": tensor}, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        pickled = archive.read("good/data.pkl")
        # The empty OrderedDict of hooks gets an entry.
        start = pickled.index(b"ccollections\nOrderedDict\n")
        end = pickled.index(b")R", start) + 2
        hooked = pickled[:end] + b"K\x01K\x02s" + pickled[end:]
        write_zip(tmp_path / "good.pt", {"good/data.pkl": hooked, "good/version": b"3\n"})
    with pytest.raises(ValueError, match="_rebuild_tensor_v2 with arguments"):
        check(tmp_path)


def test_an_extension_that_was_used_before_is_not_taken_from_its_cache(tmp_path: Path) -> None:
    copyreg.add_extension("posix", "system", 250)
    try:
        (tmp_path / "x.pt").write_bytes(b"\x80\x02\x82\xfa.")
        assert pickle.loads(b"\x80\x02\x82\xfa.") is os.system  # fills the cache
        with pytest.raises(ValueError, match=r"posix\.system"):
            check(tmp_path)
        assert pickle.loads(b"\x80\x02\x82\xfa.") is os.system, "no stand-in is left behind"
    finally:
        copyreg.remove_extension("posix", "system", 250)


GOOD, BAD = pickle.dumps({"a": 1}, 2), pickle.dumps(Runs(os.system, "true"), 2)


def write_zip(file: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return file.read_bytes()


def test_an_archive_that_could_be_read_in_two_ways_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    refused = {
        "two records of one name": {"x/data.pkl": GOOD, "x/DATA.PKL": BAD},
        "a TorchScript program": {"x/data.pkl": GOOD, "x/constants.pkl": GOOD},
        r"posix\.system": {"x/data.pkl": GOOD, "x/deeper/other.pkl": BAD},
    }
    for reason, records in refused.items():
        write_zip(file, records)
        with pytest.raises(ValueError, match=reason):
            check_file(file)
    write_zip(file, {"x/data.pkl": GOOD}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="a compressed pickle"):
        check_file(file)


def test_an_archive_behind_another_is_refused(tmp_path: Path) -> None:
    """zipfile reads the second one, torch what the last record says, counted from the start."""
    file = tmp_path / "x.pt"
    both = write_zip(file, {"x/data.pkl": BAD}) + write_zip(file, {"x/data.pkl": GOOD})
    file.write_bytes(both)
    with zipfile.ZipFile(file) as archive:
        assert archive.read("x/data.pkl") == GOOD
    with pytest.raises(ValueError, match="an archive within an archive"):
        check_file(file)
    file.write_bytes(write_zip(file, {"x/data.pkl": GOOD}) + b"more")
    with pytest.raises(ValueError, match="does not end as one"):
        check_file(file)


def test_a_record_of_two_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    data = write_zip(file, {"x/data.pkl": GOOD})
    file.write_bytes(data.replace(b"x/data.pkl", b"x/data.txt", 1))
    with pytest.raises(ValueError, match=r"a record x/data\.pkl with two names"):
        check_file(file)


def test_a_tar_which_torch_still_reads_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), io.BytesIO())
    with pytest.raises(ValueError, match="a tar archive, which torch reads as pickles"):
        check(tmp_path)


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a/../../x", "", "a\\b"])
def test_metadata_that_names_files_outside_is_refused(tmp_path: Path, name: str) -> None:
    places = {dcp.MetadataIndex("a"): _StorageInfo(name, 0, 4)}
    write_metadata(tmp_path, dcp.Metadata({}, storage_data=places))
    with pytest.raises(ValueError, match=r"\.metadata must name files of its own folder, not"):
        check(tmp_path)


def test_a_file_that_metadata_names_by_a_slot_is_scanned(
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
    with pytest.raises(ValueError, match=r"posix\.system"):
        check(tmp_path)


def test_metadata_that_reaches_beyond_a_file_is_refused(tmp_path: Path) -> None:
    distributed(tmp_path, torch.ones(4))
    places = {dcp.MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, 10**9)}
    write_metadata(tmp_path, dcp.Metadata({}, storage_data=places))
    with pytest.raises(ValueError, match=r"__0_0\.distcp ends at byte"):
        check(tmp_path)


def test_metadata_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_metadata(tmp_path, {"no": "metadata"})
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        check(tmp_path)


def test_links_inside_pass_and_links_out_are_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other.pt"
    folder.mkdir()
    torch.save({}, other)
    torch.save({}, folder / "real.pt")
    (folder / "inside.pt").symlink_to("real.pt")
    check(folder)
    (folder / "outside.pt").symlink_to(other)
    with pytest.raises(ValueError, match=r"outside\.pt must not lead out .* link to .*other\.pt"):
        check(folder)


@pytest.mark.parametrize("name", [".zarray", "zarr.json"])
def test_zarr_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Its arrays may name a codec that unpickles, and megatron-core 0.12 reads them."""
    array = tmp_path / "decoder.weight"
    array.mkdir()
    (array / name).write_text('{"filters": [{"id": "pickle"}], "dtype": "|O"}')
    with pytest.raises(ValueError, match=r"decoder\.weight.*Zarr format are not read"):
        check(tmp_path)


def test_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder; give the folder of a checkpoint"):
        check(tmp_path / "gone")


def test_reading_for_conversion_cannot_change_our_own_namespaces(tmp_path: Path) -> None:
    """The reader that keeps everything has the same guard."""
    data, _ = HOSTILE["attributes of a class"]
    with pytest.raises(ValueError, match="new attributes for the class"):
        read_pickle(io.BytesIO(data))
    assert "__eq__" in vars(Namespace) and Namespace(a=1) != Namespace(a=2)
