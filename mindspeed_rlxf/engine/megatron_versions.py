"""Where the supported versions of megatron-core differ: the only module that asks for the version.

Most differences need no question: the rest of the code uses what all versions from 0.12.1 on share.
What is left are defects of a version beside the rest of its stack, mended here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import megatron.core
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version

Function = Callable[..., Any]
Mend = tuple[Any, str, Callable[[Function], Function]]  # (module, its function, what wraps it)


@functools.cache
def adapt() -> None:
    """Mend the installed megatron-core, once per process and before a model is built."""
    for module, name, wrap in mends(megatron.core.__version__):
        setattr(module, name, wrap(getattr(module, name)))


def mends(version: str) -> tuple[Mend, ...]:
    """What a version needs; 0.13 and later need nothing."""
    if Version(version) >= Version("0.13"):
        return ()
    return (
        (distrib_optimizer, "quantize_param_shard", quantize_if_any),
        (filesystem_async, "_write_item", write_in_torch_format),
    )


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
