"""Record what a process does, for a comparison under Ray, which cannot look into its workers.

RLXF_SIM_RECORDS names a folder. The process makes an empty file there, `PID RECORD`, for its
device, for every operator that it calls, and for each random state that it restores.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("RLXF_SIM_RECORDS")


@functools.cache
def record(text: str) -> None:
    """Make the file of a record; do nothing without a folder."""
    if FOLDER:
        Path(FOLDER, f"{os.getpid()} {text}").touch()


def recorded(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        record(name)
        return operator(*args, **kwargs)

    return call
