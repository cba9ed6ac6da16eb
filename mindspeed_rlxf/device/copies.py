"""Copy between host and device memory without blocking the host, also in a separate stream.

On CPU host and device memory are the same, and copies are synchronous.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf import device


def host_buffer(num_bytes: int) -> Tensor:
    """Allocate host memory, [num_bytes] uint8; pinned (rounded up to 2**n) if there is a device."""
    pinned = device.active_library() is not None
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def upload(tensor: Tensor, target: torch.device) -> Tensor:
    """Copy a small host tensor to a device; to the CPU return it.

    A copy from pageable memory would make the host wait until the device has done all launched
    work. This one is pinned and takes its turn in the current stream.
    """
    if device.active_library() is None:
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def begin_download(tensor: Tensor) -> Tensor:
    """Return a host tensor that has the values after the host's next wait for the current stream.

    On a CPU return the tensor.
    """
    if tensor.device.type == "cpu":
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


class CopyStream:
    """A device stream for copies, executed in launch order. No stream on CPU."""

    def __init__(self) -> None:
        self._library = device.active_library()
        self._stream: Any = None if self._library is None else self._library.Stream()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Launch the block's copies in this stream without blocking the host.

        They start after all work already in the current stream. On CPU the block just runs.
        """
        if self._library is None:
            yield
            return
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event for the end of all copies launched so far; None on CPU."""
        return None if self._library is None else self._stream.record_event()

    def join(self, event: Any) -> None:
        """Make the current stream wait for an event from `mark`; None = for nothing."""
        if event is not None:
            self._library.current_stream().wait_event(event)

    def finish(self) -> None:
        """Block the host until all copies have ended; on CPU return at once."""
        if self._library is not None:
            self._stream.synchronize()
