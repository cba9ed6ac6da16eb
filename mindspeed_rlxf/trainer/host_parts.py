"""Hosts that do not see the run directory, and the parts of checkpoints that they keep.

One rank of each such host, its server, does what the driver does on its own disk: an empty hidden
folder before a save, the name after it, the removal of old ones. Before a checkpoint is loaded each
host gets the files that its ranks may read and that others keep.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint import host_part
from mindspeed_rlxf.checkpoint.host_part import CHUNK_BYTES, FileChunk, HostView
from mindspeed_rlxf.checkpoint.run_files import HOST, Entry, without_host
from mindspeed_rlxf.checkpoint.run_store import Checkpoint, Manifest, RunStore
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.runtime.group import Pending
from mindspeed_rlxf.runtime.refs import RowsRef
from mindspeed_rlxf.runtime.saved_group import PartOnHost, SavedGroup

DRIVER = ""  # the key of every host that sees the driver's folder
Held = Mapping[str, set[int]]


def key_of(view: HostView) -> str:
    return DRIVER if view.sees else f"{view.host}_{view.machine}"


@dataclass
class HostParts:
    """folder: checkpoints of the run, the same path everywhere
    groups: of the roles that are trained, by their subfolder of a checkpoint
    views:  of their ranks, by the same
    """

    store: RunStore
    groups: Mapping[str, SavedGroup]
    views: Mapping[str, list[HostView]]
    _servers: dict[str, PartOnHost] = field(init=False)  # one that sees the driver's folder too
    _key: dict[str, str] = field(init=False)  # of a host -> of who serves its folder

    def __post_init__(self) -> None:
        servers: dict[str, PartOnHost] = {}
        for name, views in self.views.items():
            for rank, view in enumerate(views):
                servers.setdefault(key_of(view), self.groups[name].part(rank))
        self._key = {key: key for key in servers} | self._shared_folders(servers)
        self._servers = {key: servers[key] for key in set(self._key.values())}

    def _shared_folders(self, servers: Mapping[str, PartOnHost]) -> dict[str, str]:
        """Hosts may share a folder with each other and not with the driver: one of them serves."""
        apart = {key: server for key, server in servers.items() if key != DRIVER}
        names = {f"{key}_{secrets.token_hex(8)}": key for key in apart}  # not those of a copy
        _wait([apart[key].mark(self.store.folder, name) for name, key in names.items()])
        calls = {key: server.marks(self.store.folder) for key, server in apart.items()}
        return {
            key: min(names[name] for name in _report(call) if name in names)
            for key, call in calls.items()
        }

    @property
    def hosts(self) -> list[str]:
        """Names of those that do not see the driver's folder."""
        return sorted({v.host for views in self.views.values() for v in views if not v.sees})

    @property
    def _apart(self) -> list[PartOnHost]:
        return [server for key, server in self._servers.items() if key != DRIVER]

    def begin(self, iteration: int) -> None:
        _wait([server.begin(self.store.folder, iteration) for server in self._apart])

    def kept_here(self, entry: Entry) -> Entry:
        """A file that a rank wrote; without its host where the driver sees it."""
        if entry.get(HOST) in self.hosts:
            return entry
        return without_host(entry)

    def commit(self, manifest: Manifest, texts: dict[str, str]) -> None:
        """Each host names its part; the driver's own comes after that.

        texts: path -> contents of the driver's files
        """
        content = manifest.to_json()
        _wait([server.commit(self.store.folder, content, texts) for server in self._apart])

    def keep(self) -> None:
        """Each host removes what the driver's disk does not have any more."""
        kept = [checkpoint.iteration for checkpoint in self.store.newest_first()]
        _wait([server.keep(self.store.folder, kept) for server in self._apart])

    def bring(self, checkpoint: Checkpoint, manifest: Manifest) -> str:
        """Give each host the files of its roles; returns what is damaged or unsafe, or nothing.

        Nothing has unpickled any of them before this.

        Raises UserError where a host that keeps files is not one of the run.
        """
        found: list[str] = []
        for name, views in self.views.items():
            folder, entries = checkpoint.path / name, manifest.part(name)
            held = self._held(folder, entries)
            wanted = {self._key[key_of(view)] for view in views}
            lost = [e for i, e in enumerate(entries) if not any(i in h for h in held.values())]
            if lost:
                return self._say_lost(checkpoint, name, lost)
            for key in sorted(wanted):
                for place in sorted(set(range(len(entries))) - held[key]):
                    if problem := self._copy(folder, entries[place], place, held, key):
                        found.append(f"{name}/{problem}")
            if not found:  # whole now, which the scan expects
                scans = [_report(self._servers[key].unsafe(folder)) for key in sorted(wanted)]
                found += [problem for problem in scans if problem]
        return "; ".join(found)

    def _held(self, folder: Path, entries: list[Entry]) -> Held:
        """Places of the files in each folder; the driver's is looked at by the driver."""
        asked = {
            key: server.present(folder, entries)
            for key, server in self._servers.items()
            if key != DRIVER
        }
        held = {key: set(_report(call)) for key, call in asked.items()}
        return held | {DRIVER: set(host_part.present(folder, entries))}

    def _say_lost(self, checkpoint: Checkpoint, name: str, lost: list[Entry]) -> str:
        """A file that its host has no longer is damage, a host that is away an error."""
        present = {view.host for views in self.views.values() for view in views}
        away = sorted({entry[HOST] for entry in lost if HOST in entry} - present)
        files = f"{name}/{lost[0]['path']}" + (f" and {len(lost) - 1} more" if lost[1:] else "")
        if not away:
            return f"{files} is on no host of this run"
        raise UserError(
            f"{checkpoint.path} has files that only {', '.join(away)} kept ({files}), and this "
            f"run's hosts are {', '.join(sorted(present))}; bring the host back, copy the folder "
            "from it to one of these, or set training.new_run=true"
        )

    def _copy(self, folder: Path, entry: Entry, place: int, held: Held, target: str) -> str:
        """Returns what is wrong with the file once it is there."""
        source = min(key for key, places in held.items() if place in places)
        writer, problem = self._servers[target], ""
        for offset in range(0, max(1, entry["size"]), CHUNK_BYTES):
            chunk: RowsRef | FileChunk
            if source == DRIVER:
                chunk = host_part.read(folder / entry["path"], offset)
            else:
                chunk = self._servers[source].read(folder / entry["path"], offset).rows()
            problem = _report(writer.write(folder, entry, offset, chunk))
        return problem


def _wait(calls: Sequence[Pending]) -> None:
    for call in calls:
        call.result()


def _report(call: Pending) -> Any:
    return call.result()[0]
