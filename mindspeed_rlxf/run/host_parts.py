"""Parts of checkpoints on hosts that do not share the driver's run directory.

The agent of each such host does what the driver does on its own disk: make an empty hidden folder
before a save, name it afterwards, remove old checkpoints. Before a checkpoint is loaded, each host
fetches the files that its ranks may read from the hosts that keep them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rlxf.cluster.host_agent import Function, HostAgent, HostCall, call_each
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.run import host_files
from mindspeed_rlxf.run.host_files import CHUNK_BYTES, HostView
from mindspeed_rlxf.run.store import Checkpoint, Manifest, RunStore
from mindspeed_rlxf.weights.state_files import HOST, Entry

DRIVER = ""  # the key of every host that sees the driver's folder
Present = Mapping[str, set[int]]  # which files each folder has
"""Key of a host -> indices of the manifest entries whose files it has."""


def _key_of(view: HostView) -> str:
    return DRIVER if view.sees else f"{view.host}_{view.machine}"


@dataclass
class HostParts:
    """Makes, commits, removes and fetches the parts of checkpoints on all hosts, by their agents.

    store:     checkpoints of the run, at the same path on every host
    roles:     hosts of the roles that are trained, by their subfolder of a checkpoint
    views:     what each of these hosts sees
    timeout_s: for each call
    """

    store: RunStore
    roles: Mapping[str, Sequence[HostAgent]]
    views: Mapping[HostAgent, HostView]
    timeout_s: float
    _servers: dict[str, HostAgent] = field(init=False)  # one agent for each folder
    _key: dict[str, str] = field(init=False)  # key of a host -> key of its server

    def __post_init__(self) -> None:
        servers: dict[str, HostAgent] = {}
        for agent, view in self.views.items():
            servers.setdefault(_key_of(view), agent)
        self._key = {key: key for key in servers} | self._map_shared_folders(servers)
        self._servers = {key: servers[key] for key in set(self._key.values())}

    def _map_shared_folders(self, servers: Mapping[str, HostAgent]) -> dict[str, str]:
        """Map each host outside the driver's folder to the first host that shares its own folder.

        A host that shares it with no other is mapped to itself. Keys of hosts stand for them; the
        first is the smallest key. Each host writes a mark file, and lists those that it sees.
        """
        apart = {key: server for key, server in servers.items() if key != DRIVER}
        names = {
            f"{key}_{secrets.token_hex(8)}": key for key in apart
        }  # differ from those in a copied folder
        for name, key in names.items():
            self._start(apart[key], host_files.write_mark, self.store.folder, name).result()
        seen = self._on_each(apart, host_files.read_marks, self.store.folder)
        return {k: min(names[name] for name in found if name in names) for k, found in seen.items()}

    def _start(self, agent: HostAgent, function: Function, *args: Any) -> HostCall:
        return agent.start(function, *args, timeout_s=self.timeout_s)

    def _on_each(
        self, servers: Mapping[str, HostAgent], function: Function, *args: Any
    ) -> dict[str, Any]:
        """Call the function on all these hosts at once, and wait.

        Returns key of the host -> result.
        """
        found = call_each(list(servers.values()), function, *args, timeout_s=self.timeout_s)
        return dict(zip(servers, found, strict=True))

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts that do not see the driver's folder."""
        return sorted({view.host for view in self.views.values() if not view.sees})

    @property
    def _apart(self) -> dict[str, HostAgent]:
        """Key of a host -> its agent, one for each folder other than the driver's."""
        return {key: server for key, server in self._servers.items() if key != DRIVER}

    def begin(self, iteration: int) -> None:
        """Make an empty hidden folder on each host that does not share the driver's folder.

        Removes unfinished checkpoints there.
        """
        self._on_each(self._apart, host_files.begin_part, self.store.folder, iteration)

    def commit(self, manifest: Manifest, texts: dict[str, str], mode: int) -> None:
        """Let each host with its own disk add the driver's files to its part, and publish it.

        See `commit_part`. The driver's own folder is not touched.
        texts: path -> contents of the driver's files; mode: their permission bits
        """
        arguments = self.store.folder, manifest.to_json(), texts, mode
        self._on_each(self._apart, host_files.commit_part, *arguments)

    def prune(self) -> None:
        """Remove from hosts with their own disks the checkpoints that the driver's folder lacks."""
        kept = [checkpoint.iteration for checkpoint in self.store.newest_first()]
        self._on_each(self._apart, host_files.keep_parts, self.store.folder, kept)

    def fetch_files(self, checkpoint: Checkpoint, manifest: Manifest) -> str:
        """Copy to each host the files of its roles that it lacks, and check pickled files.

        Returns a text on damaged or lost files, "" for none; at the first role with lost files only
        that one. Pickled files are checked only while no damage was found. Raises UserError where
        only a host outside this run has a file.
        """
        found: list[str] = []
        for name, agents in self.roles.items():
            folder, entries = checkpoint.path / name, manifest.part(name)
            present = self._find_present(folder, entries)
            wanted = sorted({self._key[_key_of(self.views[agent])] for agent in agents})
            lost = [e for i, e in enumerate(entries) if not any(i in h for h in present.values())]
            if lost:
                return self._report_lost(checkpoint, name, lost)
            for key in wanted:
                for index in sorted(set(range(len(entries))) - present[key]):
                    if problem := self._copy_file(folder, entries[index], index, present, key):
                        found.append(f"{name}/{problem}")
            if not found:  # the scan needs all files of the role
                servers = {key: self._servers[key] for key in wanted}
                scans = self._on_each(servers, host_files.find_unsafe_file, folder)
                found += [problem for problem in scans.values() if problem]
        return "; ".join(found)

    def _find_present(self, folder: Path, entries: list[Entry]) -> Present:
        """Return key of a host -> indices of the entries whose files it has.

        Only the driver's host (key DRIVER), and one host for each folder other than the driver's.
        """
        found = self._on_each(self._apart, host_files.find_present, folder, entries)
        found[DRIVER] = host_files.find_present(folder, entries)
        return {key: set(indices) for key, indices in found.items()}

    def _report_lost(self, checkpoint: Checkpoint, name: str, lost: list[Entry]) -> str:
        """Return a text that names the first file that no host has, and the number of the others.

        Raises UserError instead if hosts that kept some of them are not in this run.
        """
        present = {view.host for view in self.views.values()}
        away = sorted({entry[HOST] for entry in lost if HOST in entry} - present)
        files = f"{name}/{lost[0]['path']}" + (f" and {len(lost) - 1} more" if lost[1:] else "")
        if not away:
            return f"{files} is on no host of this run"
        raise UserError(
            Problem(
                f"{checkpoint.path}",
                f"must have its files on hosts of this run ({', '.join(sorted(present))}), "
                f"only {', '.join(away)} kept {files}",
                remedy="bring the host back, copy the folder from it to one of these, or set "
                "training.new_run=true",
            )
        )

    def _copy_file(
        self, folder: Path, entry: Entry, index: int, present: Present, target: str
    ) -> str:
        """Copy one file in chunks to the host `target` from the first host, by key, that has it.

        Returns what is wrong with the complete copy on `target`, "" if nothing.
        index: of `entry` in the manifest; present: key of a host -> indices of its files
        """
        source = min(key for key, indices in present.items() if index in indices)
        writer, problem, token = self._servers[target], "", secrets.token_hex(8)
        for offset in range(0, max(1, entry["size"]), CHUNK_BYTES):
            file = folder / entry["path"]
            chunk = (
                host_files.read_chunk(file, offset)
                if source == DRIVER
                else self._start(self._servers[source], host_files.read_chunk, file, offset)
            )
            part = folder, entry, offset, chunk, token
            problem = self._start(writer, host_files.write_chunk, *part).result()
        return problem
