"""A process that tokenizes chunks; it ends with the process that started it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Sequence

from mindspeed_rlxf.data.preprocessing.row_encoder import EncodedChunk, NumberedRow, RowEncoder

WATCH_S = 0.5

_encoder: RowEncoder | None = None  # one per process, set once by start_worker


def start_worker(encoder: RowEncoder, parent: int) -> None:
    """Keeps the encoder. An interrupt is the parent's to handle."""
    global _encoder
    _encoder = encoder
    gc.disable()  # a chunk's many small objects have no cycles, and looking for them costs 5%
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def work(rows: Sequence[NumberedRow]) -> EncodedChunk:
    assert _encoder is not None, "start_worker runs first"
    return _encoder.encode(rows)


def _end_with(parent: int) -> None:
    """A parent that was killed closes no queue; waiting on it would be for ever."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
