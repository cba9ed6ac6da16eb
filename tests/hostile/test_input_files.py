"""FIFOs, sockets, devices, folders and absurd numbers in place of files that a command opens."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.plugins import read_and_load
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.fixed_responses import load_fixed_responses
from mindspeed_rlxf.data.indexed import HEADER, MAGIC, BrokenIndex, IndexedReader
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.sidecar import read_sidecar
from mindspeed_rlxf.data.tokenizer import eos_token_ids, load_tokenizer
from mindspeed_rlxf.files.plain import open_plain, read_pointer
from mindspeed_rlxf.ops.supervisor import current_iteration
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.store import Checkpoint, RunStore
from mindspeed_rlxf.weights.convert import read_architecture
from mindspeed_rlxf.weights.formats import find_weights
from mindspeed_rlxf.weights.hf_folder import HfFolder
from tests.unit.data.byte_tokenizer import byte_tokenizer, write_tokenizer

SECONDS = 30


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A case that waits is interrupted, and fails."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bind_socket(place: Path) -> None:
    folder = os.open(place.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:  # its name may have at most 108 bytes
        made.bind(f"/proc/self/fd/{folder}/{place.name}")
    os.close(folder)


KINDS: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "socket": bind_socket,
    "device": lambda place: place.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


def prompts(file: Path) -> Any:
    return load_prompts(str(file), byte_tokenizer(), DataConfig(train_files=["x"]), 100)


def tokenizer(file: Path) -> Any:
    write_tokenizer(file.parent / "good")
    for made in (file.parent / "good").iterdir():
        if made.name != file.name:
            made.rename(file.parent / made.name)
    return load_tokenizer(str(file.parent))


def indexed(file: Path) -> Any:
    """Read an indexed data set, one file of which is there."""
    header = HEADER.pack(MAGIC, 1, 4, 0, 1) + bytes(8)
    other, content = (".bin", b"") if file.suffix == ".idx" else (".idx", header)
    file.with_suffix(other).write_bytes(content)
    return IndexedReader(file.with_suffix(""))


def run_directory(file: Path) -> Any:
    config: Any = SimpleNamespace(
        training=SimpleNamespace(
            output_dir=str(file.parent), new_run=False, resume="auto", file_mode_bits=0o600
        ),
        validation=SimpleNamespace(only=False),
    )
    if problems := RunDirectory.check(config):
        raise ValueError(problems[0])


def preprocessed(file: Path) -> Any:
    tokenizer = write_tokenizer(file.parent / "t")
    return preprocess(PreprocessOptions((str(file),), str(file.parent / "set"), tokenizer))


READERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": prompts,
    "rows.json": prompts,
    "rows.parquet": prompts,
    "given.jsonl": lambda file: load_fixed_responses(str(file), byte_tokenizer(), [1], 99, 9, 1),
    "input.jsonl": preprocessed,
    "tokenizer.json": tokenizer,
    "tokenizer_config.json": tokenizer,
    "chat_template.jinja": tokenizer,
    "config.json": lambda file: read_hf_config(file.parent),
    "generation_config.json": lambda file: eos_token_ids(byte_tokenizer(), str(file.parent), []),
    "model.safetensors": lambda file: HfFolder(file.parent),
    "model.safetensors.index.json": lambda file: HfFolder(file.parent),
    "latest_checkpointed_iteration.txt": lambda file: find_weights(file.parent),
    "manifest.json": lambda file: Checkpoint(file.parent, 1).read(),
    "a.idx": indexed,
    "a.bin": indexed,
    "set_packed_meta.json": lambda file: read_sidecar(file.parent / "set"),
    "metrics.jsonl": run_directory,
    "run.lock": run_directory,
    "plugin.py": lambda file: read_and_load(str(file)),
    "pointer.txt": read_pointer,
}
FOLDER_IS_FINE = ("metrics.jsonl", "run.lock", "chat_template.jinja", "tokenizer_config.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_other_kinds_of_files_are_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "folder" and name in FOLDER_IS_FINE:
        pytest.skip("a folder of that name is passed over, or fails later")
    place = tmp_path / "there"
    place.mkdir()
    KINDS[kind](place / name)
    if name == "input.jsonl" and kind == "folder":
        (place / name / "rows.jsonl").mkdir()
    with pytest.raises((ValueError, OSError)) as error:
        READERS[name](place / name)
    assert not isinstance(error.value, UnicodeDecodeError)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("name", ["exported_iteration.txt", "metrics.jsonl"])
def test_a_fifo_in_a_run_counts_as_an_absent_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert RunStore(tmp_path).exported() is None
    assert current_iteration(tmp_path / "metrics.jsonl") == 1


def test_a_plain_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("7\n")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_pointer(tmp_path / "a") == read_pointer(tmp_path / "b") == "7"
    with pytest.raises(FileNotFoundError), open_plain(tmp_path / "c"):
        pass


@pytest.mark.parametrize(
    "text", ["9" * 400, "1" * 5000, "\x1b[2J", "../..", "-1", "¹", "x" * 4000], ids=range(7)
)
def test_a_hostile_pointer_is_the_users_mistake(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError) as error:
        find_weights(tmp_path)
    assert "copy it again" in str(error.value) and len(str(error.value)) < 1000
    (tmp_path / "exported_iteration.txt").write_text(text)
    assert RunStore(tmp_path).exported() in (None, -1, int("9" * 400))


MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
ABSURD: list[Any] = [10**12, 10**400, -1, "2", [2], {"a": 2}, 1e12, float("nan"), float("inf"), 0.5]


def model_with(folder: Path, **keys: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(MODEL | keys))
    return folder


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize("key", [k for k in MODEL if k != "tie_word_embeddings"])
def test_an_absurd_size_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    if key == "rms_norm_eps" and value == 0.5:
        pytest.skip("a valid value")
    assert read_architecture(model_with(tmp_path))[0].num_experts == 4
    with pytest.raises(ValueError) as error:
        read_architecture(model_with(tmp_path, **{key: value}))
    assert len(str(error.value)) < 9000


def test_many_layers_of_many_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must make at most"):
        read_architecture(model_with(tmp_path, num_hidden_layers=9999, num_experts=9999))


@pytest.mark.parametrize("key", ["num_hidden_layers", "text_config"])
def test_a_tokenizer_beside_an_absurd_model_is_refused(key: str, tmp_path: Path) -> None:
    """transformers makes a list of layers to find the tokenizer's class."""
    write_tokenizer(tmp_path)
    value = 10**10 if key == "num_hidden_layers" else {"num_hidden_layers": 10**10}
    model_with(tmp_path, **{key: value})
    with pytest.raises(ValueError, match="num_hidden_layers must be a number from 0"):
        load_tokenizer(str(tmp_path))


def index(folder: Path, size: int, lengths: list[int], offsets: list[int], content: int) -> Path:
    header = HEADER.pack(MAGIC, 1, 4, size, len(lengths) + 1)
    parts = (np.asarray(lengths, "<i4"), np.asarray(offsets, "<i8"), np.zeros(len(lengths) + 1))
    (folder / "a.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    (folder / "a.bin").write_bytes(bytes(content))
    return folder / "a"


@pytest.mark.parametrize(
    ("size", "lengths", "offsets"),
    [
        (2**60, [1], [0]),
        (2**64 - 1, [], []),
        (1, [2**31 - 1], [0]),
        (1, [-1], [0]),
        (1, [1], [-8]),
        (1, [1], [2**63 - 1]),  # place + length is negative in 64 bits
        (1, [1], [2**63 - 4]),
        (50, [100] * 50, [0] * 50),  # all of them the same bytes
    ],
)
def test_an_absurd_index_is_refused(
    size: int, lengths: list[int], offsets: list[int], tmp_path: Path
) -> None:
    with pytest.raises(BrokenIndex):
        IndexedReader(index(tmp_path, size, lengths, offsets, 400))


def test_an_index_of_terabytes_that_is_a_hole_is_not_read(tmp_path: Path) -> None:
    prefix = index(tmp_path, 2**35, [], [], 0)
    os.truncate(f"{prefix}.idx", 2**40)
    with pytest.raises(OSError, match="more than"):
        IndexedReader(prefix)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.json", prompts),
        ("a.jsonl", prompts),
        ("config.json", READERS["config.json"]),
        ("set_packed_meta.json", READERS["set_packed_meta.json"]),
    ],
)
def test_a_file_that_is_a_hole_is_not_read(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"[")
    os.truncate(tmp_path / name, 2**38)
    with pytest.raises(ValueError):
        read(tmp_path / name)


@pytest.mark.parametrize("file", ["../../etc/passwd", "a/b", "", "x" * 200, "\0"])
def test_a_column_of_a_sidecar_must_be_a_file_name_without_folders(
    file: str, tmp_path: Path
) -> None:
    column = {"name": "input_ids", "file": file, "dtype": "int32", "encoding": "token_ids"}
    content = {
        "format_version": 1, "handler": "h", "template": "t", "stop_token_ids": [], "counts": {},
        "columns": [column], "tokenizer": {"path": "p", "sha256": "s"},
    }  # fmt: skip
    (tmp_path / "a_packed_meta.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"columns\.0\.file is not valid"):
        read_sidecar(tmp_path / "a")


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ValueError, match="damaged or truncated"):
        HfFolder(tmp_path)
