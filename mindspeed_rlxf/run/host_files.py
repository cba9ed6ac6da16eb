"""Functions that a host's agent runs on the files of checkpoints.

A host that does not see the driver's run directory has a store at the same path: files of its own
ranks, the driver's state and the whole manifest. Every function may run twice, because an agent
repeats a call whose process was lost.
"""

from __future__ import annotations

import glob
import os
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
    """Whether a host sees a file. machine: id that distinguishes hosts of the same name"""

    host: str
    machine: str
    sees: bool


def look_for(file: Path) -> HostView:
    """Wait up to SEEN_WITHIN_S for the file; return this host, and whether it sees the file."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return HostView(socket.gethostname(), machine_id(), file.exists())


def find_damage(folder: Path, entries: Sequence[Entry]) -> list[str]:
    """Read and hash all files of `entries`; return one text per problem, [] if there is none.

    Problems, in the order of `entries`: a file is missing, a link, unreadable, or has another size
    or hash than its entry.
    """
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(partial(content_problem, folder), entries)
        return [problem for problem in found if problem is not None]


def write_mark(store: Path, name: str) -> None:
    """Write an empty file, a mark, for other hosts that share this folder (`read_marks`).

    Its name is MARK and then `name`.
    """
    write_text(store / f"{MARK}{name}", "")


def read_marks(store: Path) -> list[str]:
    """Return the names of the marks in this folder without MARK, sorted; [] for none."""
    return sorted(path.name.removeprefix(MARK) for path in store.glob(f"{MARK}*"))


def begin_part(store: Path, iteration: int) -> None:
    """Make an empty hidden folder for this host's files; remove unfinished checkpoints."""
    RunStore(store).begin(iteration)


def commit_part(store: Path, manifest: str, texts: Mapping[str, str], mode: int = PRIVATE) -> None:
    """Write the driver's small files to the hidden folder, then publish it (`RunStore.commit`).

    A second call, with the hidden folder gone and the final one there, only writes the pointer.

    manifest: of the whole checkpoint, JSON; also written
    texts:    path -> contents of a small file
    mode:     permission bits of these files
    """
    parsed = Manifest.from_json(manifest, "the driver's manifest")
    hidden, final = RunStore(store).hidden(parsed.iteration), RunStore(store).path(parsed.iteration)
    if (
        not hidden.exists() and (final / MANIFEST).is_file()
    ):  # run again, and the part has its name already
        RunStore(store).point_to(parsed.iteration)
        return
    for path, text in texts.items():
        write_text(hidden / path, text, mode)
    RunStore(store).commit(parsed)


def keep_parts(store: Path, iterations: Sequence[int]) -> None:
    """Remove all checkpoints of this host except those of `iterations` (`RunStore.keep`)."""
    RunStore(store).keep(iterations)


def find_present(folder: Path, entries: Sequence[Entry]) -> list[int]:
    """Return the indices of the entries whose files exist on this host with the right size."""
    return [i for i, entry in enumerate(entries) if size_problem(folder, entry) is None]


def find_unsafe_file(folder: Path) -> str:
    """Return why the first bad pickled file below the folder is damaged or has more than data.

    The text names this host; "" if there is none. Only sharded checkpoints of older versions of the
    package have pickled files.
    """
    try:
        for name in (METADATA, COMMON):
            for file in sorted(folder.rglob(name)):
                _read_restricted(file)
    except ValueError as error:
        return f"{error} (on {socket.gethostname()})"
    return ""


def _read_restricted(file: Path) -> None:
    """Read a pickled file of a checkpoint without running its code, only to check it.

    The file with METADATA's name is read as that of a sharded checkpoint; another file only where
    its folder has no METADATA. Raises ValueError for a damaged file or objects other than data.
    """
    from mindspeed_rlxf.weights.dist_metadata import Metadata  # brings in torch
    from mindspeed_rlxf.weights.pickled import read_torch_file

    if file.name == METADATA:
        Metadata(file.parent, trust_files=True)
    elif not (file.parent / METADATA).exists():
        read_torch_file(file, trust_files=True)


def read_chunk(file: Path, offset: int) -> bytes:
    """Read and return up to CHUNK_BYTES of the file from the offset (bytes) on."""
    with open_file(file, "rb") as stream:
        stream.seek(offset)
        return bytes(stream.read(CHUNK_BYTES))


def write_chunk(folder: Path, entry: Entry, offset: int, chunk: bytes, token: str) -> str:
    """Write a chunk of a file to a partial file; after the last one, fsync, check and rename it.

    token: 16 random hex digits, the same for all chunks of the file; the chunk at offset 0 removes
           the partial files of other tokens
    Returns a text if the complete file differs from its manifest entry, and removes it; else "".
    "" too, without writing, for a later chunk of a file that has its final name already.
    """
    file = folder / entry["path"]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f".{file.name}.{token}.partial")
    if offset and not partial_file.exists() and size_problem(folder, entry) is None:
        return ""  # run again, and the file has its name already
    if offset == 0:
        for left in file.parent.glob(f".{glob.escape(file.name)}.{'?' * 16}.partial"):
            left.unlink(missing_ok=True)  # of killed drivers
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
        return f"{entry['path']} differs from what was written (sha256)"
    os.replace(partial_file, file)
    return ""
