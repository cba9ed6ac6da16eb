"""Find the descendants of this process, and measure their memory, threads and CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Use:
    """Sums over processes.

    cpu_s:  CPU seconds, those of ended children that were waited for included
    memory: bytes
    """

    cpu_s: float = 0.0
    memory: int = 0
    threads: int = 0


class Descendants:
    """Finds all descendants of this process, which must be a subreaper (prctl(2)).

    A process that is no descendant never becomes one, so its parent is read only once.
    """

    def __init__(self) -> None:
        self._own = os.getpid()
        self._found: set[int] = set()
        self._others: set[int] = set()

    def find(self) -> set[int]:
        """Return the pids of all descendants in /proc, zombies included."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {self._own}
        self._found &= present
        self._others &= present
        parents = {pid: _read_parent(pid) for pid in present - self._found - self._others}
        ours = {self._own} | self._found
        while new := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= new
        self._found = ours - {self._own}
        # A process whose parent was not listed is checked again at the next call.
        self._others |= {pid for pid, parent in parents.items() if parent in present} - ours
        return set(self._found)


def measure(pids: set[int]) -> Use:
    """Add up the CPU seconds, threads and bytes of memory of processes.

    The time includes that of ended children that were waited for. Processes that have ended are
    skipped.
    """
    use = Use()
    for pid in pids:
        try:
            fields = _read_stat(pid)
            use.cpu_s += sum(map(int, fields[11:15])) / _TICKS
            use.threads += int(fields[17])
            use.memory += _read_memory(pid)
        except (OSError, IndexError):
            continue
    return use


def _read_memory(pid: int) -> int:
    """Return the memory of a process in bytes: its proportional set size, else its resident size.

    Raises OSError where the process has ended.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line[:4] == "Pss:"), 0)
    except OSError:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE


def _read_parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 where the process has ended."""
    try:
        return int(_read_stat(pid)[1])
    except OSError:
        return 0


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (state) on, after pid and name.

    Raises OSError where the process has ended.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
