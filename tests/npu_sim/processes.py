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

    sources: folders with MindSpeed and its Megatron-LM; () = the small adaptor and installed ones
    """
    library = scratch / "cann" / "lib64" / "libascendcl.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    path = [ROOT, *(sources or (megatron(scratch), ADAPTOR)), LIBRARY]
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *given]),
        "ASCEND_HOME_PATH": str(scratch / "cann"), "LD_LIBRARY_PATH": str(library.parent),
        "RLXF_SIM_DEVICES": str(devices), "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip


def megatron(scratch: Path) -> Path:
    folder = scratch / "sources"
    training = folder / "megatron" / "training" / "__init__.py"
    if not training.is_file():
        training.parent.mkdir(parents=True)
        training.touch()
        core = importlib.util.find_spec("megatron.core")
        assert core is not None and core.submodule_search_locations is not None
        (folder / "megatron" / "core").symlink_to(next(iter(core.submodule_search_locations)))
    return folder
