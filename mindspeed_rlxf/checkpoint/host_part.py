"""The part of a run's checkpoints that a host keeps which does not see the driver's run directory.

Every such host has a store below the same path: files of its own ranks, the driver's state and the
whole manifest. All of this runs in one process of the host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rlxf.checkpoint import safe_folder
from mindspeed_rlxf.checkpoint.run_files import Entry, entry_of, size_problem, write_text
from mindspeed_rlxf.checkpoint.run_store import Manifest, RunStore
from mindspeed_rlxf.data.batch import Rows

CHUNK_BYTES = 64 * 2**20
MARK = ".shared_by_"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostView:
    """What a rank says of its host. machine: tells hosts of one name apart."""

    host: str
    machine: str
    sees: bool


@dataclass(frozen=True)
class FileChunk(Rows):
    """Neighbouring bytes of a file."""

    data: Tensor  # [1, bytes] uint8


@cache
def machine() -> str:
    """Another one on each machine, and after each boot; empty where there is no such file."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def view(sees: bool) -> HostView:
    return HostView(socket.gethostname(), machine(), sees)


def mark(store: Path, name: str) -> None:
    """Leave a sign there that other hosts see which share the folder with this one."""
    write_text(store / f"{MARK}{name}", "")


def marks(store: Path) -> list[str]:
    """Names of the signs that are there."""
    return sorted(path.name.removeprefix(MARK) for path in store.glob(f"{MARK}*"))


def begin(store: Path, iteration: int) -> None:
    """An empty hidden folder for this host's files; what was left of others is removed."""
    RunStore(store).begin(iteration)


def commit(store: Path, manifest: str, texts: Mapping[str, str]) -> None:
    """The hidden folder becomes the host's part of the checkpoint, with the driver's small files.

    manifest: of the whole checkpoint, JSON
    texts:    path -> contents
    """
    found = Manifest.from_json(manifest, "the driver's manifest")
    hidden = RunStore(store).hidden(found.iteration)
    for path, text in texts.items():
        write_text(hidden / path, text)
    RunStore(store).commit(found)


def keep(store: Path, iterations: Sequence[int]) -> None:
    """Remove all checkpoints but these: the driver's disk decides which are kept."""
    RunStore(store).keep(iterations)


def present(folder: Path, entries: Sequence[Entry]) -> list[int]:
    """Places of the files that are here, in their length."""
    return [i for i, entry in enumerate(entries) if size_problem(folder, entry) is None]


def unsafe(folder: Path) -> str:
    """What a pickle below the folder would do that no checkpoint does; empty = nothing."""
    try:
        safe_folder.check(folder)
    except ValueError as error:
        return f"{error} (on {socket.gethostname()})"
    return ""


def read(file: Path, offset: int) -> FileChunk:
    """Up to CHUNK_BYTES from there on."""
    with file.open("rb") as stream:
        stream.seek(offset)
        data = bytearray(stream.read(CHUNK_BYTES))
    if not data:
        return FileChunk(torch.empty(1, 0, dtype=torch.uint8))
    return FileChunk(torch.frombuffer(data, dtype=torch.uint8)[None])


def write(folder: Path, entry: Entry, offset: int, chunk: FileChunk) -> str:
    """Put bytes there; with its last ones the file gets its name, and is on the disk.

    Returns what is wrong where the whole is not what the manifest says.
    """
    file = folder / entry["path"]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb" if offset == 0 else "r+b") as stream:
        stream.seek(offset)
        stream.write(chunk.data.numpy().tobytes())
        end = stream.tell()
    if end < entry["size"]:
        return ""
    found = entry_of(folder, partial)
    if (found["size"], found["sha256"]) != (entry["size"], entry["sha256"]):
        partial.unlink()
        return f"{entry['path']} is not what was written (sha256)"
    os.replace(partial, file)
    return ""
