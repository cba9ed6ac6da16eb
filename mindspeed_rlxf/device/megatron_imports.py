"""Keep Megatron from importing wandb and TensorBoard in every process.

`megatron.core.timers` imports them if installed: 0.7 s and 24 MB per rank. Our trackers run in the
driver, so no rank needs them. Every other module can still import them.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from types import FrameType

HIDDEN = frozenset({"wandb", "torch.utils.tensorboard"})
MEGATRON = "megatron."
IMPORTLIB = "<frozen importlib"


class TrackersHiddenFromMegatron(MetaPathFinder):
    """Import hook raising ModuleNotFoundError if a Megatron module imports a tracker."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise for a tracker imported by Megatron; otherwise find nothing."""
        if fullname not in HIDDEN:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(IMPORTLIB):
            frame = frame.f_back  # to the module whose import statement runs
        if frame is not None and str(frame.f_globals.get("__name__", "")).startswith(MEGATRON):
            raise ModuleNotFoundError(f"{fullname} is hidden from Megatron", name=fullname)


def hide_trackers() -> None:
    """Make tracker imports by Megatron fail from now on; idempotent."""
    if not any(isinstance(finder, TrackersHiddenFromMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, TrackersHiddenFromMegatron())
