"""Copy between host and device memory in a stream of its own, beside the current stream.

On a CPU both are the same memory, and a copy is made at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_rlxf.device import facade


def host_buffer(num_bytes: int) -> Tensor:
    """Allocate pinned host memory, which the device copies from and to directly.

    torch rounds such memory up to a power of two. Returns [num_bytes] uint8, not initialised.
    """
    pinned = facade.active_library() is not None
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


class CopyStream:
    """A stream that makes copies in the order of their launch."""

    def __init__(self) -> None:
        self._library = facade.active_library()
        self._stream: Any = None if self._library is None else self._library.Stream()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Launch the copies of the block after all work launched so far, without waiting."""
        if self._library is None:
            yield
            return
        self._stream.wait_stream(self._library.current_stream())
        with self._library.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event after the copies launched so far; None on a CPU."""
        return None if self._library is None else self._stream.record_event()

    def join(self, event: Any) -> None:
        """Let work launched from now on in the current stream wait for the event."""
        if event is not None:
            self._library.current_stream().wait_event(event)

    def finish(self) -> None:
        """Wait on the host until all copies have ended."""
        if self._library is not None:
            self._stream.synchronize()
