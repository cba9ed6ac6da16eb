"""Copy between host and device memory in a separate stream, while the current stream computes.

On a CPU host and device memory are the same, and copies are made at once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf import device


def host_buffer(num_bytes: int) -> Tensor:
    """Allocate host memory, [num_bytes] uint8; pinned (and rounded up to 2**n) beside a device."""
    pinned = device.active_library() is not None
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


class CopyStream:
    """A device stream for copies, which run in the order of their launch. No stream on a CPU."""

    def __init__(self) -> None:
        self._library = device.active_library()
        self._stream: Any = None if self._library is None else self._library.Stream()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Launch the copies of a `with` block in this stream; the host does not wait for them.

        They start after all work that the current stream has when the block is entered. On a CPU
        the block just runs.
        """
        if self._library is None:
            yield
            return
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event that occurs when the copies launched so far have ended; None on a CPU."""
        return None if self._library is None else self._stream.record_event()

    def join(self, event: Any) -> None:
        """Make later work of the current stream wait for an event of `mark`; None = for nothing."""
        if event is not None:
            self._library.current_stream().wait_event(event)

    def finish(self) -> None:
        """Block the host until all copies have ended; on a CPU return at once."""
        if self._library is not None:
            self._stream.synchronize()
