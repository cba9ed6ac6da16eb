"""Tokens that entering rows copy from the cache: a prompt, or what prompts have in common.

Prompts of a task often begin alike, by a system message or by examples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK = 16  # tokens, in whose multiples beginnings are shared


@dataclass(frozen=True)
class CachedPrefix:
    """The first tokens of an entering row, whose keys and values another one has.

    Attributes:
        source: That row of the cache.
        length: How many tokens; 0 = none, the row is computed.
    """

    source: int
    length: int


class PrefixTree:
    """Finds a cache row whose prompt begins as another one, in blocks of BLOCK tokens."""

    def __init__(self) -> None:
        # (number of the blocks before, tokens of a block) -> (number with it, cache row)
        self._blocks: dict[tuple[int, bytes], tuple[int, int]] = {}

    def add(self, prompt: np.ndarray, cache_row: int) -> None:
        """Add the prompt of a cache row; one that was added before goes first."""
        number = 0
        for block in _blocks_of(prompt):
            number, _ = self._blocks.setdefault((number, block), (len(self._blocks) + 1, cache_row))

    def find(self, prompt: np.ndarray) -> CachedPrefix:
        """Return the longest known beginning of a prompt; of length 0 if there is none."""
        number, cache_row, length = 0, 0, 0
        for block in _blocks_of(prompt):
            if (number, block) not in self._blocks:
                break
            number, cache_row = self._blocks[number, block]
            length += BLOCK
        return CachedPrefix(cache_row, length)


def _blocks_of(prompt: np.ndarray) -> Iterator[bytes]:
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        yield prompt[end - BLOCK : end].tobytes()


def order_by_source(pack: dict[int, CachedPrefix]) -> list[list[int]]:
    """Return a pack's cache rows in groups; each copies from rows before its group."""
    groups: list[list[int]] = [[]]
    group_of: dict[int, int] = {}
    for cache_row, cached in pack.items():
        is_copied = cached.length > 0 and cached.source in group_of
        group_of[cache_row] = group_of[cached.source] + 1 if is_copied else 0
        if group_of[cache_row] == len(groups):
            groups.append([])
        groups[group_of[cache_row]].append(cache_row)
    return groups
