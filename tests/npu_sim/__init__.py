"""A simulated NPU: a torch device named `npu` with its own memory, streams, HCCL and rules.

`build` compiles the device from `device/`. `library/` has the torch_npu for it, whose operators
compute on the host what they are documented to compute; `adaptor/` has a small replacement of
MindSpeed, used where RLXF_MINDSPEED names no real one. Only processes with the environment of
`processes.environment` import these two. `rules` lists what the device refuses. `run` and `ray_run`
compare PPO on it with PPO on the CPU, in `cases`.
"""

import importlib.util
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).resolve().parent / "library"


def load(name: str) -> Any:
    """Load one module of torch_npu without its package, whose import registers the device npu."""
    file = LIBRARY / "torch_npu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
