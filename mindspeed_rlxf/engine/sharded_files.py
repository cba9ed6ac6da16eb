"""A Megatron checkpoint of a model's weights, written by megatron-core.

Its plain save forks in megatron-core 0.12, so the parts of an asynchronous one are called here.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """torch's error of a checkpoint is no Exception, which nobody expects: an OSError instead,
    with the cause of the first rank that failed and the space that is left."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise OSError(
            f"{folder}: rank {rank} of {len(error.failures)} that failed says: "
            f"{type(cause).__name__}: {cause} ({free / 2**20:.0f} MiB are free there)"
        ) from None


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """A collective: what ranks agree on, what each writes, what is left.

    Raises OSError on all ranks when one could not write.
    """
    with told(folder):
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        arguments = list(request.async_fn_args)
        if request.async_fn is not None:  # else another rank writes all that this one holds
            if request.preload_fn is not None:
                arguments[1] = request.preload_fn()
            request.async_fn(*arguments, **request.async_fn_kwargs)
        for finalize in request.finalize_fns:
            finalize()
