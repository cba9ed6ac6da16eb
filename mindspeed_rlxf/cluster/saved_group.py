"""The driver's view of export, save and load of a role that learns."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.cluster.group import Pending, RoleGroup
from mindspeed_rlxf.cluster.host_agent import HostAgent
from mindspeed_rlxf.roles.saved import SavedRole


class SavedGroup:
    """A base of the groups of these roles. `saved`: their ranks that hold the state."""

    saved: RoleGroup

    @property
    def hosts(self) -> list[HostAgent]:
        """Agents of the hosts whose ranks hold the state, in the order of ranks."""
        return list(dict.fromkeys(self.saved.pool.hosts))

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> Pending:
        return self.saved.call(SavedRole.export, hf_folder, megatron_folder)

    def begin_save(self, folder: Path) -> Pending:
        """Takes as long as a copy to the host."""
        return self.saved.call(SavedRole.begin_save, folder)

    def end_save(self) -> Pending:
        """Reports: the files that all ranks wrote, the same from each."""
        return self.saved.call(SavedRole.end_save)

    def load_state(self, folder: Path) -> Pending:
        """Reports: `Loaded`, the same problem from each."""
        return self.saved.call(SavedRole.load_state, folder)
