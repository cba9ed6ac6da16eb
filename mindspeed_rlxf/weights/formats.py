"""Find a weight folder's format, and the weights in it.

Imports little, as every node calls it.
"""

from enum import Enum
from pathlib import Path

from mindspeed_rlxf.weights.megatron_layout import RANK_FOLDER, TRACKER

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
METADATA, COMMON = ".metadata", "common.pt"  # of Megatron's sharded checkpoints
STATE_FILES = "state_*.safetensors"  # of a role in a checkpoint of a run

FAMILIES = {
    "llama2": ("llama", "qwen2"),
    "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3_moe",),
    "mixtral": ("mixtral",),
}
"""--model-type-hf -> model_type of config.json; the old tool calls Qwen2.5 llama2 too."""


class Format(str, Enum):
    """Weight formats: `hf`, the --ckpt-format values, and that used by runs."""

    HF = "hf"
    LEGACY = "torch"
    TORCH_DIST = "torch_dist"
    RUN_STATE = "run_state"  # read only


def find_weights(folder: Path) -> tuple[Format, Path]:
    """Return a folder's format, and the folder with the weights: itself or one inside it.

    A missing folder or unknown format counts as Hugging Face, whose reader reports what is missing.

    Raises:
        ValueError: several iterations without a tracker file, or a tracker file naming no folder.
        OSError: an unreadable tracker file.
    """
    hf = (INDEX, SINGLE, PICKLED_INDEX, PICKLED)
    if not folder.is_dir() or any((folder / name).exists() for name in hf):
        return Format.HF, folder
    if (folder / METADATA).exists():
        return Format.TORCH_DIST, folder
    if any(folder.glob(STATE_FILES)):
        return Format.RUN_STATE, folder
    if any(RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir()):
        return Format.LEGACY, folder
    iteration = _find_iteration(folder)
    return (Format.HF, folder) if iteration is None else find_weights(iteration)


def _find_iteration(folder: Path) -> Path | None:
    """Return the iteration folder in the tracker file; without one, the only folder."""
    tracker = folder / TRACKER
    if tracker.exists():
        text = tracker.read_bytes()[:100].decode("utf-8", "replace").strip()
        name = text if text == "release" else f"iter_{text:0>7}"
        is_name = text == "release" or (text.isdecimal() and len(text) < 19)
        if not is_name or not (folder / name).is_dir():
            raise ValueError(
                f"{tracker} names {text[:40]!r}, and {folder / name[:40]} is not there; "
                "give the folder of an iteration, or copy it again"
            )
        return folder / name
    iterations = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    if len(iterations) > 1:
        raise ValueError(
            f"{folder} holds {', '.join(path.name for path in iterations[:5])} and no {TRACKER}; "
            "give the folder of one of them"
        )
    return iterations[0] if iterations else None
