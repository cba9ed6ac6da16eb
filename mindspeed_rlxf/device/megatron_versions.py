"""Where the supported versions of megatron-core differ: the only module that asks for the version.

Most differences need no question: the rest of the code uses what all versions from 0.12.1 on share.
What is left is here.
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
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

Function = Callable[..., Any]
Mend = tuple[Any, str, Callable[[Function], Function]]  # (module, its function, what wraps it)


def before_0_13() -> bool:
    """Of the megatron-core that is imported."""
    return Version(megatron.core.__version__) < Version("0.13")


def chunk_argument(chunk: int | None) -> dict[str, int | None]:
    """Keyword of what Megatron builds for a chunk of a virtual pipeline; none in 0.12."""
    return {} if before_0_13() else {"vp_stage": chunk}


@contextlib.contextmanager
def current_chunk(chunk: int | None) -> Iterator[None]:
    """A chunk is built and described inside this: 0.12 has a global in place of the keyword."""
    if chunk is None or not before_0_13():
        yield
        return
    outside = parallel_state.get_virtual_pipeline_model_parallel_rank()
    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(outside)


@functools.cache
def mend() -> None:
    """Mend the defects of the imported version, once per process and before a model is built."""
    for module, name, wrap in mends():
        setattr(module, name, wrap(getattr(module, name)))
    if Version(megatron.core.__version__) >= Version("0.15"):
        # What writes puts its result here, in this very process. Megatron's own queue is one
        # between processes, with a server process for each rank.
        filesystem_async._results_queue = queue.Queue()
    filesystem_async.mp = InProcess()
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron 0.16 looks at the name without Transformer Engine too, and then does without it.
        moe_utils.te_general_gemm = None


def mends() -> tuple[Mend, ...]:
    """What the imported version needs."""
    if not before_0_13():
        return ()
    return (
        (distrib_optimizer, "quantize_param_shard", quantize_if_any),
        (filesystem_async, "_write_item", write_in_torch_format),
    )


class InProcess:
    """In place of `multiprocessing` where Megatron writes the files of a checkpoint.

    It forks a process for each file, out of one with a device, collectives and Ray's threads, and
    waits for ever when that one is killed; a fork also outlives a rank that is killed.
    """

    Queue = JoinableQueue = SimpleQueue = queue.Queue

    def get_context(self, _method: str) -> InProcess:
        return self

    class Process:
        """Runs where it is started; what fails is put in the queue of results by the target."""

        def __init__(
            self, target: Function, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> None:
            self._run = functools.partial(target, *args, **(kwargs or {}))

        def start(self) -> None:
            self._run()

        def join(self) -> None:
            """It has ended."""

    def Manager(self) -> InProcess:
        return self


def quantize_if_any(quantize: Function) -> Function:
    """The distributed optimizer casts its fp8 parameters; without Transformer Engine that call
    raises even where there are none."""

    @functools.wraps(quantize)
    def wrapper(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return quantize(model_params, *args, **kwargs) if model_params else None

    return wrapper


def write_in_torch_format(write: Function) -> Function:
    """torch's writer of checkpoint items, whose format newer versions of torch want to be told."""
    if "serialization_format" not in inspect.signature(write).parameters:
        return write
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)
