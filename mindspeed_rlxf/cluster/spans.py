"""Spans of the calls that have ended, kept until they are written to the timeline.

Every call that the driver waits for is recorded: those of the loop, of validation, of transfers of
weights and of saves. A process that writes no timeline keeps the newest ones only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from mindspeed_rlxf.cluster.protocol import Reply
from mindspeed_rlxf.reporting.timeline import MOST_RANKS, Span

LONGEST_UNSEEN_S = 0.001  # of a wait that is left out
_ended: deque[Span] = deque(maxlen=20_000)


def record_call(pool: str, names: Sequence[str], replies: Sequence[Reply], asked: float) -> None:
    """Record spans of a call that has ended, for `take_all`.

    They are the work of each rank, and the driver's wait until now if it is not under 1 ms. Ranks
    from MOST_RANKS on are left out.
    names: `role.method` of each reply
    asked: when the driver began to wait, seconds since the epoch
    """
    for name, reply in zip(names, replies, strict=False):
        if reply.rank < MOST_RANKS:
            _ended.append(Span(name, pool, reply.rank, reply.started, reply.seconds))
    waited = time.time() - asked
    if names and waited > LONGEST_UNSEEN_S:
        _ended.append(Span(f"wait for {names[0]}", "driver", 0, asked, waited, "wait"))


def take_all() -> list[Span]:
    """Remove and return the recorded spans, in the order of recording."""
    found = []
    while _ended:
        found.append(_ended.popleft())
    return found
