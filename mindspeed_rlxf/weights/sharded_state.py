"""Tensors of a role in a checkpoint of an older version of this package, which megatron-core wrote.

Read as `role_state` is, by Hugging Face names and without running a pickle (`torch_dist`).
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.formats import METADATA
from mindspeed_rlxf.weights.hf_folder import shape_problems
from mindspeed_rlxf.weights.reader import MegatronWeights, refuse
from mindspeed_rlxf.weights.role_state import WEIGHT, RunState, StateReader
from mindspeed_rlxf.weights.torch_dist import open_torch_dist, read_torch_dist


class ShardedRunState:
    """The folder as a `StateReader`."""

    def __init__(self, folder: Path, architecture: ArchitectureConfig) -> None:
        """Errors: ValueError when a file holds more than data."""
        self.folder, self._architecture = folder, architecture
        self._metadata = open_torch_dist(folder)
        self._slots: dict[str, MegatronWeights] = {}

    def slot(self, name: str) -> MegatronWeights:
        """Errors: ValueError when the folder has no such slot, or holds another model."""
        if name not in self._slots:
            prefix = "" if name == WEIGHT else f"optimizer.state.{name}."
            self._slots[name] = read_torch_dist(self._metadata, self._architecture, prefix)
        return self._slots[name]

    def close(self) -> None:
        self._slots.clear()


def open_state(folder: Path, architecture: ArchitectureConfig, head: Head) -> StateReader:
    """The tensors in a role's folder of a checkpoint, of this version or an older one.

    Errors: ValueError when a file is damaged, or holds another model.
    """
    if (folder / METADATA).exists():
        return ShardedRunState(folder, architecture)
    state, expected = RunState(folder), hf_shapes(architecture, head)
    weights = state.slot(WEIGHT)
    extra = [f"{name} is not in the model" for name in weights.names() if name not in expected]
    refuse(folder, shape_problems(weights, expected) + extra)
    return state
