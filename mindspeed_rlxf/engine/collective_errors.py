"""Raise one rank's error on all ranks of a role; gather items of all ranks."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


def gather_all(items: list[T]) -> list[T]:
    """Return all ranks' items as one list, by rank; a collective over the world."""
    items_of_rank: list[list[T]] = [[]] * dist.get_world_size()
    dist.all_gather_object(items_of_rank, items)
    return list(itertools.chain.from_iterable(items_of_rank))


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
    own_failures = []
    if failed is not None:
        own_failures.append(f"rank {dist.get_rank()}: {_describe(failed)}")
    failures = gather_all(own_failures)
    if failures:
        raise OSError(f"{folder}: {'; '.join(failures)}") from failed


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
        cause = "another rank could not write, see the first rank"
        if error.failures:
            rank = min(error.failures)
            cause = f"rank {rank}: {_describe(error.failures[rank][0])}"
        raise OSError(f"{folder}: {cause}") from None
    except RuntimeError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise OSError(f"{folder}: {_describe(error.__cause__)}") from None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
