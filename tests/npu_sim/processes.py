"""Return the environment of processes that have simulated NPUs."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from tests.npu_sim import LIBRARY
from tests.processes import ROOT

ADAPTOR, KERNELS = LIBRARY.with_name("adaptor"), LIBRARY.with_name("kernels")


def environment(
    scratch: Path, devices: int = 1, sources: Sequence[Path] = (), **variables: str
) -> dict[str, str]:
    """Return the environment of a process with simulated NPUs: PYTHONPATH, and an empty CANN.

    scratch:   folder in which links and files for the process are made
    sources:   folders with MindSpeed and with the Megatron-LM that it requires; () = the installed
               megatron-core and the small adaptor
    variables: further variables, which replace others of the same name
    """
    library = scratch / "cann" / "lib64" / "libascendcl.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    path = [ROOT, *(sources or (megatron(scratch), ADAPTOR)), LIBRARY]
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *given]),
        "ASCEND_HOME_PATH": str(scratch / "cann"),
        "LD_LIBRARY_PATH": str(library.parent),
        "RLXF_SIM_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def megatron(scratch: Path) -> Path:
    """Return a folder with the installed megatron.core (a link) and an empty megatron.training."""
    folder = scratch / "sources"
    training = folder / "megatron" / "training" / "__init__.py"
    if not training.is_file():
        training.parent.mkdir(parents=True)
        training.touch()
        core = importlib.util.find_spec("megatron.core")
        assert core is not None and core.submodule_search_locations is not None
        (folder / "megatron" / "core").symlink_to(next(iter(core.submodule_search_locations)))
    return folder
