"""A save by megatron-core in three steps: what ranks agree on, what each writes, what is left.

`dist_checkpointing.save` does all of it at once, and in megatron-core 0.12 in a fork.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException


@dataclass(frozen=True)
class ShardedSave:
    """A save that has begun: `write` has no collectives and may run in a thread, `finish` has."""

    folder: Path
    write: Callable[[], None]
    _finalize: tuple[Callable[[], None], ...]

    @classmethod
    def begin(cls, state: dict[str, Any], folder: Path) -> ShardedSave:
        """A collective; tensors of `state` are copied to the host where they are not there."""
        with told(folder):
            request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        arguments = list(request.async_fn_args)
        if request.async_fn is None:  # another rank writes all that this one holds
            return cls(folder, _nothing, tuple(request.finalize_fns))
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        write = partial(request.async_fn, *arguments, **request.async_fn_kwargs)
        return cls(folder, write, tuple(request.finalize_fns))

    def finish(self) -> None:
        """A collective. Raises OSError on all ranks when one could not write."""
        with told(self.folder):
            for finalize in self._finalize:
                finalize()


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


def _nothing() -> None:
    """Stands for writing."""


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """All three steps."""
    save = ShardedSave.begin(state, folder)
    save.write()
    save.finish()
