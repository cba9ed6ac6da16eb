"""Export, save and load of a role that learns; a base of these roles."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine.protocol import TrainEngine
from mindspeed_rlxf.weights.state_files import Loaded


class SavedRole:
    engine: TrainEngine

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
        """Go on from there. Report: `Loaded`, with the problem where the folder holds no state."""
        try:
            return RoleOutput(report=Loaded(same_layout=self.engine.load_state(folder)))
        except ValueError as error:
            return RoleOutput(report=Loaded(problem=str(error)))
