"""Errors and items that all ranks of a role must agree on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


def gather_all(items: list[T]) -> list[T]:
    """Return all ranks' items as one list, by rank; a collective over the world."""
    gathered: list[list[T]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]


@contextlib.contextmanager
def fail_together(folder: Path) -> Iterator[None]:
    """Raise OSError on all ranks in the world if the block raises an Exception on one.

    A collective after the block, which must contain none. Without it the other ranks would wait in
    their next collective for the failed rank. The text names `folder`, to which the block writes,
    and each failed rank; on the rank itself the error is the cause.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    mine = [] if failed is None else [f"rank {dist.get_rank()}: {_describe(failed)}"]
    if named := gather_all(mine):
        raise OSError(f"{folder}: {'; '.join(named)}") from failed


@contextlib.contextmanager
def raise_os_errors(folder: Path) -> Iterator[None]:
    """Turn megatron-core's exceptions for a failed write inside the block into an OSError.

    Its text has the cause on the lowest failed rank. Other exceptions pass. megatron-core 0.16
    raises torch's CheckpointException (no subclass of Exception) on all ranks, and only the first
    one has the failures. 0.12 raises a RuntimeError on the failed rank.
    """
    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {n}: {_describe(e)}" for n, (e, _) in sorted(error.failures.items())]
        said = causes[0] if causes else "another rank could not write, see the first rank"
        raise OSError(f"{folder}: {said}") from None
    except RuntimeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise OSError(f"{folder}: {_describe(error.__cause__)}") from None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
