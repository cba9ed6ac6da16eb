"""Handle differences between supported megatron-core versions.

This is the only module reading the version. All other code uses functions available since 0.12.1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

Function = Callable[..., Any]


def is_before_0_13() -> bool:
    """Return whether the imported megatron-core is older than 0.13."""
    return Version(megatron.core.__version__) < Version("0.13")


def chunk_argument(chunk: int | None) -> dict[str, int | None]:
    """Return {"vp_stage": chunk}, for Megatron's chunk builders; {} in 0.12."""
    return {} if is_before_0_13() else {"vp_stage": chunk}


def gathers_ahead_argument(value: bool) -> dict[str, bool]:
    """Return {"overlap_param_gather": value}, for the optimizer config; {} in 0.12.

    It tells the optimizer whether forward passes gather the weights; 0.12 reads that from the
    data-parallel wrapper.
    """
    return {} if is_before_0_13() else {"overlap_param_gather": value}


@contextlib.contextmanager
def current_chunk(chunk: int | None) -> Iterator[None]:
    """Set the global virtual pipeline chunk index inside the block, in 0.12.

    Does nothing from 0.13 on, which passes the index as an argument, nor for None.
    """
    if chunk is None or not is_before_0_13():
        yield
        return
    outside = parallel_state.get_virtual_pipeline_model_parallel_rank()
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(outside)


@functools.cache
def apply_patches() -> None:
    """Patch the imported Megatron for this process; call it before building a model.

    Fixes version-specific defects, and makes checkpoint writing stay in this process. Idempotent.
    """
    if is_before_0_13():
        quantize, write = distrib_optimizer.quantize_param_shard, filesystem_async._write_item
        distrib_optimizer.quantize_param_shard = quantize_if_any(quantize)
        filesystem_async._write_item = write_in_torch_format(write)
    if Version(megatron.core.__version__) >= Version("0.15"):
        # Writers run in this process and put their results here. Megatron's own queue is one
        # between processes, with a server process for each rank.
        filesystem_async._results_queue = queue.Queue()
    filesystem_async.mp = InProcess()
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron 0.16 reads the name even without Transformer Engine, and accepts None.
        moe_utils.te_general_gemm = None
    begin = CheckpointWithoutOutput.__init__
    if begin.__defaults__ == (False,):
        # Megatron 0.16 takes the default fp8=False for fp8, and needs Transformer Engine for that.
        begin.__defaults__ = (None,)


class InProcess:
    """Replaces `multiprocessing` in Megatron's checkpoint writer.

    Megatron forks a writer process per file. Our process has a device, collectives and Ray's
    threads, which a fork can break. It would also wait forever for a killed writer, and a writer
    would outlive a killed rank.
    """

    Queue = JoinableQueue = SimpleQueue = queue.Queue

    def get_context(self, _method: str) -> InProcess:
        """Return this replacement for any start method."""
        return self

    class Process:
        """Runs its target in `start`, in this process. The target reports its own failures."""

        def __init__(
            self, target: Function, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> None:
            self._run = functools.partial(target, *args, **(kwargs or {}))

        def start(self) -> None:
            """Run the target."""
            self._run()

        def join(self) -> None:
            """Return at once: `start` has run the target."""

    def Manager(self) -> InProcess:
        """Return this replacement, which also makes queues."""
        return self


def quantize_if_any(quantize: Function) -> Function:
    """Wrap `quantize` to return None at once for an empty parameter list.

    Megatron's fp8 cast raises without Transformer Engine even then.
    """

    @functools.wraps(quantize)
    def wrapper(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return quantize(model_params, *args, **kwargs) if model_params else None

    return wrapper


def write_in_torch_format(write: Function) -> Function:
    """Bind `serialization_format` to TORCH_SAVE in torch's checkpoint item writer.

    A writer without this parameter is returned unchanged.
    """
    if "serialization_format" not in inspect.signature(write).parameters:
        return write
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)
