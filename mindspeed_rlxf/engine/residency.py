"""Decide which parts of the engines of a process are on its device.

Engines of one process compute one after the other. While an engine computes, the parts that it
needs are on the device; all other movable parts of all engines are moved to the host first. After
that the parts stay on the device until another engine needs it, so that the next phase of the same
role need not copy them.
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
    """Parts that an open `holding` block keeps on the device."""

    offload: Offload
    parts: frozenset[Part]


_known: weakref.WeakSet[Offload] = weakref.WeakSet()
_holds: list[_Hold] = []


def register(offload: Offload) -> None:
    """Add an engine whose parts may be moved, until the engine is collected."""
    _known.add(offload)


@contextlib.contextmanager
def holding(
    *needs: tuple[Offload, Collection[Part]], later: Collection[Part] = ()
) -> Iterator[None]:
    """Keep parts on the device inside the block, beside the parts of enclosing blocks.

    All other movable parts of all engines are moved to the host first, also where `needs` is empty,
    to make room for something else. Parts stay on the device after the block.

    needs: (offload of an engine, its parts)
    later: parts whose copies may still run in the block; call `Offload.await_copies` before use
    """
    holds = [_Hold(offload, frozenset(parts)) for offload, parts in needs]
    _holds.extend(holds)
    try:
        for offload in list(_known):  # make room
            held = frozenset[Part]().union(*(h.parts for h in _holds if h.offload is offload))
            offload.offload(offload.movable - held)
        for hold in holds:
            hold.offload.onload(hold.parts)
        for hold in holds:
            hold.offload.await_copies(*(hold.parts - frozenset(later)))
        yield
    finally:
        for hold in holds:
            _holds.remove(hold)
