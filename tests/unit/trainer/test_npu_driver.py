"""On NPU the driver counts, plans, checks and starts without importing torch_npu or MindSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.device.npu_recorder import smi_table
from tests.unit.trainer.test_bad_files import good  # noqa: F401  (the fixture)

ROOT = Path(__file__).parents[3]
# Tells who imported it, and cannot be imported: an `except ImportError` does not hide it.
LIBRARY = """
import os, traceback
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n" + "".join(traceback.format_stack()))
raise ImportError(f"{__name__} does not belong here")
"""
# Every path of the driver in one process, up to the first call of a Ray that runs.
DRIVER = """
import os, sys
from types import SimpleNamespace
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.errors import UserError
line = ["-cd", sys.argv[1], "-cn", "good", "device.kind=npu"]
assert main([*line, "resource_pool.ref=2"]) == 2
main([*line, "dry_run=true", f"training.output_dir={sys.argv[2]}/dry"])
from mindspeed_rlxf.runtime import ray_pools, ray_runtime
def no_cluster(*args):
    return SimpleNamespace(own=True, address="", close=lambda: None)
def reached(*args):
    raise UserError("as far as the pools")
ray_runtime.open_cluster, ray_pools.RayPools.create = no_cluster, reached
assert main([*line, f"training.output_dir={sys.argv[2]}/run"]) == 2
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.doctor import devices, software
from mindspeed_rlxf.runtime.node_report import report
report([], None, DeviceKind.NPU)
print(*devices.look(DeviceKind.NPU), *software.look(DeviceKind.NPU), sep="\\n")
print("driver", os.getpid())
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a host with four NPUs, whose libraries tell who imports them."""
    for name in ("torch_npu", "mindspeed"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text(LIBRARY)
    # transformers asks for the version before it imports the library
    about = tmp_path / "path" / "torch_npu-2.7.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1\n")
    smi = tmp_path / "bin" / "npu-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\ncat <<'TABLE'\n{smi_table(4)}TABLE\n")
    smi.chmod(0o755)
    library = tmp_path / "cann" / "lib64" / "libascendcl.so"
    library.parent.mkdir(parents=True)
    library.touch()
    hidden = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    return {
        **hidden,
        "PATH": f"{smi.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}",
        "ASCEND_HOME_PATH": str(tmp_path / "cann"),
        "LD_LIBRARY_PATH": str(library.parent),
        "IMPORTED": str(tmp_path / "imported"),
        "RAY_ADDRESS": "local",
    }


def test_the_driver_imports_neither_torch_npu_nor_mindspeed(
    good: Path,  # noqa: F811
    machine: dict[str, str],
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", DRIVER, str(good), str(tmp_path)]
    done = subprocess.run(command, env=machine, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "needs 5 npu devices and this host has 4" in done.stderr
    assert "as far as the pools" in done.stderr
    driver = done.stdout.split()[-1]
    file = Path(machine["IMPORTED"])
    told = file.read_text() if file.exists() else ""
    imported = [line.split() for line in told.splitlines() if line[:1].isdigit()]
    assert not [name for pid, name in imported if pid == driver], told
    assert [name for _, name in imported] == ["torch_npu"]  # the doctor's question to torch
