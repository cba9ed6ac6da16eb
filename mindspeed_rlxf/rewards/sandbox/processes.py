"""The processes that descend from one, and what they use."""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Use:
    """Sums over processes. cpu_s: seconds, those of ended children included; memory: bytes."""

    cpu_s: float = 0.0
    memory: int = 0
    threads: int = 0


class Descendants:
    """Finds all descendants of this process, which must be their subreaper.

    A process that is no descendant never becomes one, so each is looked at once.
    """

    def __init__(self) -> None:
        self._own = os.getpid()
        self._found: set[int] = set()
        self._others: set[int] = set()

    def find(self) -> set[int]:
        """Return the pids of all that live or wait to be reaped."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {self._own}
        self._found &= present
        self._others &= present
        parents = {pid: _parent(pid) for pid in present - self._found - self._others}
        ours = {self._own} | self._found
        while new := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= new
        self._found = ours - {self._own}
        # One whose parent is not among those seen is looked at again.
        self._others |= {pid for pid, parent in parents.items() if parent in present} - ours
        return set(self._found)


def measure(pids: set[int]) -> Use:
    """Add up what processes use. One that has ended meanwhile counts nothing."""
    use = Use()
    for pid in pids:
        try:
            fields = _stat(pid)
            use.cpu_s += sum(map(int, fields[11:15])) / _TICKS
            use.threads += int(fields[17])
            use.memory += _memory(pid)
        except (OSError, IndexError):
            continue
    return use


def _memory(pid: int) -> int:
    """Return proportional memory, where shared pages count once, else the resident memory."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line[:4] == "Pss:"), 0)
    except OSError:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE


def _parent(pid: int) -> int:
    """Return the parent; 0 where the process has ended."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: a name may hold spaces."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
