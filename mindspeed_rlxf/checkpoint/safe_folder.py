"""Whether a checkpoint folder is safe to open: nothing in it is run, or leads out of it.

Megatron-core and torch unpickle `.metadata`, `common.pt`, objects inside `.distcp` files and
`model_optim_rng.pt`. All these are scanned first (`pickle_scan`). What changes in the folder after
`check` is not seen.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from mindspeed_rlxf.checkpoint.formats import METADATA
from mindspeed_rlxf.checkpoint.inert_pickle import Refused
from mindspeed_rlxf.checkpoint.inside import inside, leaves
from mindspeed_rlxf.checkpoint.layout import RANK_FILE
from mindspeed_rlxf.checkpoint.pickle_scan import scan, scan_pickle
from mindspeed_rlxf.checkpoint.torch_file import MappedFile
from mindspeed_rlxf.checkpoint.zip_pickles import ZIP

CHUNKS = ".distcp"
ZARR = (".zarray", ".zgroup", "zarr.json")  # its codecs may unpickle; the reader is not ours
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
MAX_PROBLEMS = 8
MODEL_ALONE = (  # run by a user who trusts a file, for it runs what the file wants
    "import sys, torch; f = sys.argv[1]; "
    "d = torch.load(f, map_location='cpu', weights_only=False); "
    "torch.save({k: d[k] for k in d if k.startswith('model')}, f)"
)


def check(folder: str | Path) -> None:
    """Read every pickle below `folder` without running it.

    Errors: ValueError that names each file, and what in it is no part of a checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a checkpoint")
    problems = []
    for problem in _problems(folder):
        problems.append(problem)
        if len(problems) == MAX_PROBLEMS:
            break
    if problems:
        raise ValueError("\n".join(problems))


def check_file(path: Path) -> None:
    """As `check`, of one file that `torch.load` would read."""
    if problem := _problem(path, None):
        raise ValueError(problem)


def _problems(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files + [f for f in folders if os.path.islink(os.path.join(parent, f))]):
            path = Path(parent, name)
            if path.is_symlink() and leaves(folder, path):
                yield _leading_out(path)
            elif path.is_dir() or name.endswith(CHUNKS):
                continue  # what `.metadata` does not name is not read
            elif name in ZARR:
                yield (
                    f"{path} must not be there: checkpoints in Zarr format are not read; save it "
                    "with --ckpt-format torch_dist"
                )
            elif name == METADATA:
                yield from _of_metadata(path)
            elif (name.endswith(PICKLES) or _looks_like_pickles(path)) and (
                problem := _problem(path, None)
            ):
                yield problem


def _leading_out(path: Path) -> str:
    return (
        f"{path} must not lead out of the checkpoint, it is a link to {path.resolve()}; "
        "copy the file in its place"
    )


def _looks_like_pickles(path: Path) -> bool:
    """Whatever its name is."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == ZIP or (start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"))


def _problem(path: Path, part: IO[bytes] | None) -> str | None:
    """What is wrong with a file of torch.save, or with a part of a larger one."""
    try:
        if part is None:
            file = MappedFile(path)
            part = cast(IO[bytes], file.window(0, file.size))
        scan(part)
    except Refused as error:
        return _refused(path, error)
    except ValueError as error:
        return _unreadable(path, error)
    return None


def _refused(path: Path, error: Refused) -> str:
    return (
        f"{path} must hold nothing but the data of a checkpoint, it wants {error}; do not open a "
        f"file of others. Where you made it, {_again(path)}"
    )


def _again(path: Path) -> str:
    """How its maker saves a file without what is refused; its classes are only there."""
    there = "in the environment that wrote it"
    if path.name == RANK_FILE:
        command = f'python -c "{MODEL_ALONE}" {shlex.quote(str(path))}'
        return f"save a copy of it, then keep its model alone, {there}: {command}"
    if path.name.endswith(PICKLES):
        return (
            f"take that out and save it again, {there}: torch.load(file, weights_only=False), "
            "torch.save(what is left, file)"
        )
    return f"save the checkpoint again without that, {there}"


def _unreadable(path: Path, error: ValueError) -> str:
    text = str(error)
    if text.startswith(str(path)):  # a sentence of its own
        return text
    verb = "" if text.startswith("is ") else "cannot be read: "
    return f"{path} {verb}{text}; copy it again"


def _of_metadata(path: Path) -> Iterator[str]:
    """`.metadata` itself and every part of a `.distcp` file that it names."""
    try:
        metadata = scan_pickle(io.BytesIO(path.read_bytes()))
        places = {_place(info) for info in metadata.storage_data.values()}
    except Refused as error:
        yield _refused(path, error)
        return
    except (ValueError, AttributeError, TypeError) as error:
        yield _unreadable(path, ValueError(error))
        return
    files: dict[str, MappedFile] = {}
    for name, offset, length in sorted(places):
        try:
            if name not in files:
                files[name] = MappedFile(inside(path.parent, name, METADATA))
            part = files[name].window(offset, length)
        except ValueError as error:
            yield str(error)
            continue
        if problem := _problem(files[name].path, cast(IO[bytes], part)):
            yield problem


def _place(info: Any) -> tuple[str, int, int]:
    """File, offset and length of one entry, bytes."""
    if getattr(info, "transform_descriptors", None):
        raise ValueError("compressed entries cannot be scanned")
    name, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
        raise TypeError("an entry of another kind than torch.distributed.checkpoint writes")
    return name, offset, length
