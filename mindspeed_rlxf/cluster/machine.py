"""Tell machines of one host name apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine() -> str:
    """Another one on each machine, and after each boot; empty where there is no such file."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
