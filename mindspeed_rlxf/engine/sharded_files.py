"""Write a Megatron checkpoint of a model's weights with megatron-core.

In megatron-core 0.12 a synchronous save forks processes. So this module runs the steps of an
asynchronous save one after the other, in this process.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException


def name_with_free_space(error: BaseException, folder: Path) -> str:
    """Return class and text of an error, with the free space of the folder's disk.

    0 MiB where the folder does not exist
    """
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return f"{type(error).__name__}: {error} ({free / 2**20:.0f} MiB are free there)"


@contextlib.contextmanager
def raise_os_errors(folder: Path) -> Iterator[None]:
    """Turn torch's CheckpointException inside the block into an OSError.

    Its text has the cause on the lowest rank that failed and the free space. Other exceptions pass.
    (The exception of torch is no subclass of Exception.)
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(
            f"{folder}: rank {rank} of {len(error.failures)} that failed says: "
            f"{name_with_free_space(cause, folder)}"
        ) from None


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded checkpoint into `folder`, which must exist; a collective.

    state: Megatron's sharded state dict
    Raises OSError on all ranks where one could not write.
    """
    with raise_os_errors(folder):
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        arguments = list(request.async_fn_args)
        if request.async_fn is not None:  # None = other ranks write all that this rank has
            if request.preload_fn is not None:
                arguments[1] = request.preload_fn()
            request.async_fn(*arguments, **request.async_fn_kwargs)
        for finalize in request.finalize_fns:
            finalize()
