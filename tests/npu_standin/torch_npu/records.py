"""Tells a rehearsal what its processes did, where it cannot look into them: under Ray.

`RLXF_STANDIN_TOLD` names a folder. A process leaves an empty file in it for every operator that it
calls, when it calls it first, one for its device, and one for each random state that it is given:
`PID operator`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("RLXF_STANDIN_TOLD")


@functools.cache
def tell(what: str) -> None:
    if FOLDER:
        Path(FOLDER, f"{os.getpid()} {what}").touch()


def telling(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        tell(name)
        return operator(*args, **kwargs)

    return call
