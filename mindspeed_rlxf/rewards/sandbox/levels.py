"""Levels of isolation, and the threats that each one prevents."""

from __future__ import annotations

from enum import Enum

from mindspeed_rlxf.config.enums import SandboxLevel


class Threat(str, Enum):
    """An attack that a hostile program may try; the value is its description for messages."""

    CPU_TIME = "computing without end"
    MEMORY = "filling the memory"
    OUTPUT = "output without end"
    FILE_SIZE = "a large file"
    DISK = "many files, and so a full disk"
    PROCESSES = "many processes or threads"
    STAYING = "processes that outlive the run"
    FILES = "reading or changing files of the host, of the user and of other samples"
    OTHERS = "signals to other processes, reading or tracing them"
    SHARED_MEMORY = "shared memory and message queues"
    SECRETS = "reading secrets of the environment and of open files"
    PRIVILEGES = "more privileges, by setuid programs, namespaces, mounts or devices"
    NETWORK = "network, loopback and abstract sockets included"


_LIMITS = frozenset({Threat.CPU_TIME, Threat.MEMORY, Threat.OUTPUT, Threat.FILE_SIZE})
_ALL = frozenset(Threat)

PREVENTS: dict[SandboxLevel, frozenset[Threat]] = {
    SandboxLevel.BUBBLEWRAP: _ALL,
    SandboxLevel.NAMESPACES: _ALL,
    SandboxLevel.UID: _ALL,
    SandboxLevel.LIMITS: _LIMITS,
}
"""Level -> threats that it prevents, the strongest level first."""


def describe(level: SandboxLevel) -> str:
    """Return a line for the log: the level, and the threats that it does not prevent, if any."""
    missing = [threat.value for threat in Threat if threat not in PREVENTS[level]]
    if not missing:
        return f"sandbox: programs run at level {level.value}; docs/security.md has what it stops"
    return f"sandbox: programs run at level {level.value}, which does not prevent: " + "; ".join(
        missing
    )
