"""Files of a run's checkpoints on one host, as its agent looks at, reads and writes them.

A host that does not see the driver's run directory has a store below the same path: files of its
own ranks, the driver's state and the whole manifest. Every function may run twice: an agent runs
one again whose process was lost.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mindspeed_rlxf.cluster.nodes import machine_id
from mindspeed_rlxf.files.safe import PRIVATE, new_file, open_file
from mindspeed_rlxf.run.store import MANIFEST, Manifest, RunStore
from mindspeed_rlxf.weights.formats import COMMON, METADATA
from mindspeed_rlxf.weights.inside import inside
from mindspeed_rlxf.weights.state_files import (
    Entry,
    content_problem,
    entry_of,
    size_problem,
    write_text,
)

CHUNK_BYTES = 64 * 2**20
READERS = 4  # threads that read and hash files
SEEN_WITHIN_S = 10.0
MARK = ".shared_by_"


@dataclass(frozen=True)
class HostView:
    """What a process says of its host. machine: tells hosts of one name apart."""

    host: str
    machine: str
    sees: bool


def look_for(file: Path) -> HostView:
    """Whether the file is here: a network file system may take a moment to show a new one."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return HostView(socket.gethostname(), machine_id(), file.exists())


def damage(folder: Path, entries: Sequence[Entry]) -> list[str]:
    """What is wrong with the files; reads them all, several at a time."""
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(partial(content_problem, folder), entries)
        return [problem for problem in found if problem is not None]


def mark(store: Path, name: str) -> None:
    """Leave a sign there that other hosts see which share the folder with this one."""
    write_text(store / f"{MARK}{name}", "")


def marks(store: Path) -> list[str]:
    """Names of the signs that are there."""
    return sorted(path.name.removeprefix(MARK) for path in store.glob(f"{MARK}*"))


def begin(store: Path, iteration: int) -> None:
    """An empty hidden folder for this host's files; what was left of others is removed."""
    RunStore(store).begin(iteration)


def commit(store: Path, manifest: str, texts: Mapping[str, str], mode: int = PRIVATE) -> None:
    """The hidden folder becomes the host's part of the checkpoint, with the driver's small files.

    manifest: of the whole checkpoint, JSON
    texts:    path -> contents
    mode:     of these, which hold the configuration
    """
    found = Manifest.from_json(manifest, "the driver's manifest")
    hidden, final = RunStore(store).hidden(found.iteration), RunStore(store).path(found.iteration)
    if not hidden.exists() and (final / MANIFEST).is_file():  # run again: it has its name
        RunStore(store).point_to(found.iteration)
        return
    for path, text in texts.items():
        write_text(hidden / path, text, mode)
    RunStore(store).commit(found)


def keep(store: Path, iterations: Sequence[int]) -> None:
    """Remove all checkpoints but these: the driver's disk decides which are kept."""
    RunStore(store).keep(iterations)


def present(folder: Path, entries: Sequence[Entry]) -> list[int]:
    """Places of the files that are here, in their length."""
    return [i for i, entry in enumerate(entries) if size_problem(folder, entry) is None]


def unsafe(folder: Path) -> str:
    """What is wrong with the sharded checkpoints of older versions below the folder, before a role
    reads them; empty = nothing. Checkpoints of this version hold no pickle."""
    try:
        for name in (METADATA, COMMON):
            for file in sorted(folder.rglob(name)):
                _read_restricted(file)
    except ValueError as error:
        return f"{error} (on {socket.gethostname()})"
    return ""


def _read_restricted(file: Path) -> None:
    from mindspeed_rlxf.weights.torch_dist import open_torch_dist  # brings in torch
    from mindspeed_rlxf.weights.torch_file import read_torch_file

    if file.name == METADATA:
        open_torch_dist(file.parent)
    elif not (file.parent / METADATA).exists():
        read_torch_file(inside(file.parent, file.name, COMMON))


def read(file: Path, offset: int) -> bytes:
    """Up to CHUNK_BYTES from there on."""
    with open_file(file, "rb") as stream:
        stream.seek(offset)
        return bytes(stream.read(CHUNK_BYTES))


def write(folder: Path, entry: Entry, offset: int, chunk: bytes, token: str) -> str:
    """Put bytes there; with its last ones the file gets its name, and is on the disk.

    token: the same for all parts of the file, and known to nobody else
    Returns what is wrong where the whole is not what the manifest says.
    """
    file = folder / entry["path"]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}.{token}.partial")
    if offset and not partial_file.exists() and size_problem(folder, entry) is None:
        return ""  # run again: it has its name
    if offset == 0:
        for left in _partial_files(file):
            left.unlink(missing_ok=True)
        new_file(partial_file).close()
    with open_file(partial_file, "r+b", None) as stream:
        stream.seek(offset)
        stream.write(chunk)
        end = stream.tell()
    if end < entry["size"]:
        return ""
    found = entry_of(folder, partial_file)
    if (found["size"], found["sha256"]) != (entry["size"], entry["sha256"]):
        partial_file.unlink()
        return f"{entry['path']} is not what was written (sha256)"
    os.replace(partial_file, file)
    return ""


def _partial_files(file: Path) -> list[Path]:
    """What killed drivers left of it."""
    ours = re.compile(re.escape(f".{file.name}.") + r"[0-9a-f]{16}\.partial")
    return [path for path in file.parent.iterdir() if ours.fullmatch(path.name)]
