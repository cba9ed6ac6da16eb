"""What a role that learns does with checkpoints of the run; a base of these roles.

Methods of one host touch files alone: the driver runs them on one rank of it, between others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint import host_part
from mindspeed_rlxf.checkpoint.host_part import FileChunk
from mindspeed_rlxf.checkpoint.run_files import Entry
from mindspeed_rlxf.data.batch import RoleOutput


class SavedRole:
    engine: Any  # the role's training engine

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> RoleOutput:
        """Write the weights; a collective over the role's ranks."""
        self.engine.export(hf_folder, megatron_folder)
        return RoleOutput()

    def begin_save(self, folder: Path) -> RoleOutput:
        """Start to write the role's part of a run checkpoint, as it is now."""
        self.engine.begin_save(folder)
        return RoleOutput()

    def end_save(self) -> RoleOutput:
        """Wait until it is written. Report: its files, with sizes and hashes."""
        return RoleOutput(report=self.engine.end_save())

    def load_state(self, folder: Path) -> RoleOutput:
        """Go on from there. Report: whether the same layout wrote it."""
        return RoleOutput(report=self.engine.load_state(folder))

    def views(self, file: Path) -> RoleOutput:
        """Report: by rank its host, and whether a file of the run directory is there."""
        return RoleOutput(report=self.engine.views(file))

    def damage(self, folder: Path, entries: list[Entry], on_each_host: bool) -> RoleOutput:
        """Read the role's files, each rank its share. Report: what is wrong with them."""
        return RoleOutput(report=self.engine.damage(folder, entries, on_each_host))

    def mark_part(self, store: Path, name: str) -> RoleOutput:
        host_part.mark(store, name)
        return RoleOutput()

    def marks_of_part(self, store: Path) -> RoleOutput:
        """Report: names of the hosts that left a mark in this host's folder."""
        return RoleOutput(report=host_part.marks(store))

    def begin_part(self, store: Path, iteration: int) -> RoleOutput:
        host_part.begin(store, iteration)
        return RoleOutput()

    def commit_part(self, store: Path, manifest: str, texts: dict[str, str]) -> RoleOutput:
        host_part.commit(store, manifest, texts)
        return RoleOutput()

    def keep_parts(self, store: Path, iterations: list[int]) -> RoleOutput:
        host_part.keep(store, iterations)
        return RoleOutput()

    def present_files(self, folder: Path, entries: list[Entry]) -> RoleOutput:
        """Report: places of the files that this host has."""
        return RoleOutput(report=host_part.present(folder, entries))

    def unsafe_part(self, folder: Path) -> RoleOutput:
        """Report: what is wrong with the pickles in the folder, on this host."""
        return RoleOutput(report=host_part.unsafe(folder))

    def read_file(self, file: Path, offset: int) -> RoleOutput:
        """Rows: FileChunk."""
        return RoleOutput(host_part.read(file, offset))

    def write_file(self, folder: Path, entry: Entry, offset: int, chunk: FileChunk) -> RoleOutput:
        """Report: what is wrong with the file, once it is whole."""
        return RoleOutput(report=host_part.write(folder, entry, offset, chunk))
