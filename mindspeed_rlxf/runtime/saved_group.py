"""The driver's view of what a role that learns does with checkpoints of the run."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.checkpoint.host_part import FileChunk
from mindspeed_rlxf.checkpoint.run_files import Entry
from mindspeed_rlxf.roles.saved import SavedRole
from mindspeed_rlxf.runtime.group import Pending, RoleGroup
from mindspeed_rlxf.runtime.refs import RowsRef


class SavedGroup:
    """A base of the groups of these roles. `saved`: their ranks that hold the state."""

    saved: RoleGroup

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> Pending:
        return self.saved.call(SavedRole.export, hf_folder, megatron_folder)

    def begin_save(self, folder: Path) -> Pending:
        """Takes as long as a copy to the host."""
        return self.saved.call(SavedRole.begin_save, folder)

    def end_save(self) -> Pending:
        """Reports: the files that all ranks wrote, the same from each."""
        return self.saved.call(SavedRole.end_save)

    def load_state(self, folder: Path) -> Pending:
        """Reports: whether the same layout wrote it."""
        return self.saved.call(SavedRole.load_state, folder)

    def damage(self, folder: Path, entries: list[Entry], on_each_host: bool = False) -> Pending:
        """Reports: what is wrong with these files of the role, the same from each.

        on_each_host: each has files of its own
        """
        return self.saved.call(SavedRole.damage, folder, entries, on_each_host)

    def views(self, file: Path) -> Pending:
        """Reports: by rank its host, and whether the file is there, the same from each."""
        return self.saved.call(SavedRole.views, file)

    def part(self, rank: int) -> PartOnHost:
        return PartOnHost(self.saved, rank)


class PartOnHost:
    """The checkpoints on the host of one rank, which that rank reads and writes."""

    def __init__(self, group: RoleGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def mark(self, store: Path, name: str) -> Pending:
        return self._group.call_on(self._rank, SavedRole.mark_part, store, name)

    def marks(self, store: Path) -> Pending:
        """Report: names of the marks in the folder."""
        return self._group.call_on(self._rank, SavedRole.marks_of_part, store)

    def begin(self, store: Path, iteration: int) -> Pending:
        return self._group.call_on(self._rank, SavedRole.begin_part, store, iteration)

    def commit(self, store: Path, manifest: str, texts: dict[str, str]) -> Pending:
        """manifest: JSON of the whole checkpoint; texts: path -> contents of the driver's files"""
        return self._group.call_on(self._rank, SavedRole.commit_part, store, manifest, texts)

    def keep(self, store: Path, iterations: list[int]) -> Pending:
        return self._group.call_on(self._rank, SavedRole.keep_parts, store, iterations)

    def present(self, folder: Path, entries: list[Entry]) -> Pending:
        """Report: places of the files that are there."""
        return self._group.call_on(self._rank, SavedRole.present_files, folder, entries)

    def unsafe(self, folder: Path) -> Pending:
        """Report: what is wrong with the pickles in the folder."""
        return self._group.call_on(self._rank, SavedRole.unsafe_part, folder)

    def read(self, file: Path, offset: int) -> Pending:
        """Rows: FileChunk."""
        return self._group.call_on(self._rank, SavedRole.read_file, file, offset)

    def write(self, folder: Path, entry: Entry, offset: int, chunk: RowsRef | FileChunk) -> Pending:
        """Report: what is wrong with the file, once it is whole."""
        return self._group.call_on(self._rank, SavedRole.write_file, folder, entry, offset, chunk)
