"""What the driver asks of the ranks of every trained role."""

from pathlib import Path

from mindspeed_rlxf.cluster.group import Pending, RoleGroup
from mindspeed_rlxf.engine.train_engine import TrainEngine


class TrainedGroup:
    """Base of the groups of trained roles: exports, saves and loads their training state."""

    learners: RoleGroup  # the ranks that hold the state

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> Pending:
        """Submit writing the weights in each format that has a folder."""
        return self.learners.call_engine(TrainEngine.export, hf_folder, megatron_folder)

    def begin_save(self, folder: Path) -> Pending:
        """Submit a copy of the training state; files are written until `end_save`."""
        return self.learners.call_engine(TrainEngine.begin_save, folder)

    def end_save(self) -> Pending:
        """Submit the wait for the files of `begin_save`. Reports: Written, of all ranks."""
        return self.learners.call_engine(TrainEngine.end_save)

    def load_state(self, folder: Path) -> Pending:
        """Submit loading the role's state from a checkpoint. Reports: Loaded."""
        return self.learners.call_engine(TrainEngine.load_state, folder)
