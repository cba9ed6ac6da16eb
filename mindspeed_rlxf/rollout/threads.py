"""Run blocking requests for many items in a thread pool."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


class Stopped(RuntimeError):
    """Nobody waits for the answer any more."""


def ask_all(
    items: Mapping[K, T], ask: Callable[[T, Callable[[], None]], R], most: int, stall_s: float
) -> Iterator[tuple[K, R]]:
    """Yield (key, `ask`'s answer) as the answers come, from at most `most` threads.

    `ask` calls its second argument at every sign of life, which may raise Stopped. After an early
    close of the iterator all threads have ended; after an error they may still wait for answers.

    Raises:
        TimeoutError: No thread showed life for `stall_s`. Other errors are those of `ask`.
    """
    done, stopped, seen = queue.SimpleQueue[Future[R]](), threading.Event(), [time.monotonic()]
    threads, keys = ThreadPoolExecutor(most), dict[Future[R], K]()

    def beat() -> None:
        seen[0] = time.monotonic()
        if stopped.is_set():
            raise Stopped

    try:
        for key, item in items.items():
            future = threads.submit(ask, item, beat)
            keys[future] = key
            future.add_done_callback(done.put)
        while keys:
            try:
                future = done.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - seen[0] > stall_s:
                    raise TimeoutError(f"it sent no token for {stall_s:g} s") from None
                continue
            beat()
            yield keys.pop(future), future.result()
    except GeneratorExit:
        stopped.set()
        threads.shutdown(cancel_futures=True)
        raise
    finally:
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)
