"""Decide which parts of the engines of a process are on its device.

Engines of one process compute one after the other. An engine holds the parts that it needs while it
computes; all other movable parts are moved to the host first. Parts stay on the device after the
block until another engine needs it, so that the next phase of the same role need not copy them.
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
    """Add an engine whose parts may be moved; the entry ends with the life of the engine."""
    _known.add(offload)


@contextlib.contextmanager
def holding(
    *needs: tuple[Offload, Collection[Part]], later: Collection[Part] = ()
) -> Iterator[None]:
    """Keep parts on the device inside the block, beside the parts of enclosing blocks.

    All other movable parts are moved to the host first, also with no `needs`: that makes room for
    something else.

    later: parts whose copies may still run; call `Offload.arrive` before their use
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
    """Remove all engines and holds, before the process serves another pool."""
    _known.clear()
    _holds.clear()


def _make_room() -> None:
    """Move all movable parts that no block holds to the host."""
    for offload in list(_known):
        held = frozenset[Part]().union(*(h.parts for h in _holds if h.offload is offload))
        offload.offload(offload.movable - held)
