"""Keep Megatron from importing wandb and TensorBoard, which it does in every process.

`megatron.core.timers` imports both where they are installed: 0.7 s and 24 MB of each rank. Our
trackers run in the driver, so nothing of a rank needs them. Every other module still finds them.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from types import FrameType

HIDDEN = frozenset({"wandb", "torch.utils.tensorboard"})
MEGATRON = "megatron."
IMPORTLIB = "<frozen importlib"


class TrackersHiddenFromMegatron(MetaPathFinder):
    """Raises ModuleNotFoundError where a module of Megatron imports a tracker."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in HIDDEN and _importer(sys._getframe(1)).startswith(MEGATRON):
            raise ModuleNotFoundError(f"{fullname} is hidden from Megatron", name=fullname)


def _importer(frame: FrameType | None) -> str:
    """Return the name of the module whose import statement runs; empty where there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(IMPORTLIB):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def hide_trackers() -> None:
    """Hide the trackers from what Megatron imports from now on; once in a process."""
    if not any(isinstance(finder, TrackersHiddenFromMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, TrackersHiddenFromMegatron())
