"""Error messages for files of checkpoints that are damaged, or hold more than data."""

from __future__ import annotations

import shlex
from pathlib import Path

from mindspeed_rlxf.weights.layout import RANK_FILE
from mindspeed_rlxf.weights.pickle_names import Refused

FREELY = f"weights_only={False}"  # for the maker of a file: this runs code of the file
MODEL_ALONE = (
    "import sys, torch; f = sys.argv[1]; "
    f"d = torch.load(f, map_location='cpu', {FREELY}); "
    "torch.save({k: d[k] for k in d if k.startswith('model')}, f)"
)


def refusal(path: Path, error: Refused) -> ValueError:
    """Make the error for a file with pickled objects other than data. error: which ones"""
    return ValueError(
        f"{path} must hold nothing but the data of a checkpoint, it has {error}; do not open a "
        f"file of others. Where you made it, {_advise_saving_again(path)}"
    )


def _advise_saving_again(path: Path) -> str:
    """Return a text that tells the maker of a file how to save it without these objects.

    A command for RANK_FILE, calls of torch for other .pt files, a sentence for others.
    """
    there = "in the environment that wrote it"
    if path.name == RANK_FILE:
        command = f'python -c "{MODEL_ALONE}" {shlex.quote(str(path))}'
        return f"save a copy of it, then keep its model alone, {there}: {command}"
    if path.suffix == ".pt":
        return (
            f"take that out and save it again, {there}: torch.load(file, {FREELY}), "
            "torch.save(what is left, file)"
        )
    return f"save the checkpoint again without that, {there}"


def unreadable(path: Path, error: ValueError) -> ValueError:
    """Make the error for a damaged file: path, damage and "copy it again".

    error: the damage, or a whole sentence that begins with the path, which becomes the message
    """
    text = str(error)
    if text.startswith(str(path)):  # a whole sentence
        return ValueError(text)
    verb = "" if text.startswith("is ") else "cannot be read: "
    return ValueError(f"{path} {verb}{text}; copy it again")
