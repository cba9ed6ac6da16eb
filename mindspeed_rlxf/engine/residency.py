"""Which parts of the engines of a process are on its device.

Engines of one process compute one after the other. Before one computes it holds the parts that it
needs; all others that may leave do so first. What is held stays after the block, until another
engine needs the device: the next phase of the same role finds it there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mindspeed_rlxf.engine.offload import Offload
from mindspeed_rlxf.engine.protocol import Part


@dataclass(eq=False)
class _Hold:
    offload: Offload
    parts: frozenset[Part]


_known: weakref.WeakSet[Offload] = weakref.WeakSet()
_holds: list[_Hold] = []


def register(offload: Offload) -> None:
    """Let an engine's parts leave when others need the device; it is forgotten with the engine."""
    _known.add(offload)


@contextlib.contextmanager
def holding(
    *needs: tuple[Offload, Collection[Part]], later: Collection[Part] = ()
) -> Iterator[None]:
    """Keep parts on the device inside the block, beside those that blocks around it hold.

    All other parts that may leave are moved to the host before. No need = room for something else.
    later: parts whose copies to the device may go on; `Offload.arrive` comes before their use
    """
    holds = [_Hold(offload, frozenset(parts)) for offload, parts in needs]
    _holds.extend(holds)
    try:
        _make_room()
        for hold in holds:
            hold.offload.onload(hold.parts)
        for hold in holds:
            hold.offload.arrive(*(hold.parts - frozenset(later)))
        yield
    finally:
        for hold in holds:
            if hold in _holds:
                _holds.remove(hold)


def forget() -> None:
    """Drop all engines and what they hold, before their process serves another pool."""
    _known.clear()
    _holds.clear()


def _make_room() -> None:
    """Move away all parts that may leave and that nobody holds."""
    for offload in list(_known):
        held = frozenset[Part]().union(*(h.parts for h in _holds if h.offload is offload))
        offload.offload(offload.movable - held)
