"""A functional stand-in for torch_npu on CPU, for rehearsals with the real MindSpeed sources.

Only the processes of a rehearsal have FOLDER on their path. A name that the stand-in lacks raises
an AttributeError with the name; no name is created on demand.
"""

import importlib.util
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def load(name: str) -> Any:
    """Load one module of torch_npu without its package, whose import registers the device npu."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / "torch_npu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
