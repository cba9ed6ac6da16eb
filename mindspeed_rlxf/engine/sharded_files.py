"""Write a model's weights as a Megatron checkpoint with megatron-core.

In megatron-core 0.12 a synchronous save forks processes. So this module runs an asynchronous save's
steps one after another, in this process.
"""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from mindspeed_rlxf.engine.collective_errors import raise_os_errors


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into the existing `folder`; a collective.

    Raises OSError if this rank could not write. With megatron-core 0.16 all ranks raise it if a
    rank's share could not be written; otherwise, as with 0.12, the others wait in a collective.
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
