"""Describe processes that have simulated NPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from tests.npu_standin import FOLDER as STANDIN
from tests.processes import ROOT

HERE = Path(__file__).resolve().parent
LIBRARY, ADAPTOR = HERE / "library", HERE / "adaptor"


def environment(
    scratch: Path, devices: int = 1, sources: Sequence[Path] = (), **variables: str
) -> dict[str, str]:
    """Of a process with simulated NPUs: its path of imports, and a CANN that holds nothing.

    scratch: a folder for links and files that the process finds
    sources: folders of MindSpeed and of the Megatron-LM that it pairs with; none = the installed
             megatron-core and the small adaptor
    """
    library = scratch / "cann" / "lib64" / "libascendcl.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    path = [ROOT, *(sources or (megatron(scratch), ADAPTOR)), LIBRARY, STANDIN]
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *given]),
        "ASCEND_HOME_PATH": str(scratch / "cann"),
        "LD_LIBRARY_PATH": str(library.parent),
        "RLXF_STANDIN_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def megatron(scratch: Path) -> Path:
    """A folder in which the installed megatron.core has an (empty) megatron.training beside it."""
    folder = scratch / "sources"
    training = folder / "megatron" / "training" / "__init__.py"
    if not training.is_file():
        training.parent.mkdir(parents=True)
        training.touch()
        core = importlib.util.find_spec("megatron.core")
        assert core is not None and core.submodule_search_locations is not None
        (folder / "megatron" / "core").symlink_to(next(iter(core.submodule_search_locations)))
    return folder
