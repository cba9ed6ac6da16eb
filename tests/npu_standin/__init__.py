"""A functional stand-in for torch_npu on CPU, for rehearsals with the real MindSpeed sources.

`FOLDER` goes on the path of a rehearsal's processes and of nothing else. What is not there is an
AttributeError that names it: nothing is made up on demand.
"""

import importlib.util
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def load(name: str) -> Any:
    """One file of the stand-in alone: importing the package claims the device name."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / "torch_npu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
