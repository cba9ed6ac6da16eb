"""On NPU the driver counts, plans, checks and starts without importing torch_npu or MindSpeed."""

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.forks import Forks, receive
from tests.processes import ROOT
from tests.unit.device.npu_recorder import smi_table
from tests.unit.trainer import test_bad_files

good = test_bad_files.good  # a fixture: folder of everything that a run needs
# Records its importer, and cannot be imported: an `except ImportError` does not hide it.
LIBRARY = """
import os, traceback
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n" + "".join(traceback.format_stack()))
raise ImportError(f"{__name__} does not belong here")
"""
# All that the driver does, in one process, up to the first call of a Ray that runs.
DRIVER = """
import os, sys
from mindspeed_rlxf.cli.train import main
line = ["-cd", sys.argv[1], "-cn", "good", "device.kind=npu"]
assert main([*line, "resource_pool.ref=2"]) == 2
print("driver", os.getpid())
from types import SimpleNamespace
from mindspeed_rlxf.config.problems import Problem, UserError
main([*line, "dry_run=true", f"training.output_dir={sys.argv[2]}/dry"])
from mindspeed_rlxf.cluster.ray import runtime as ray_runtime
def no_cluster(*args):
    return SimpleNamespace(own=True, address="", close=lambda: None)
def reached(*args):
    raise UserError(Problem("", "as far as the pools"))
ray_runtime.open_cluster, ray_runtime.RayRuntime.create_pools = no_cluster, reached
assert main([*line, f"training.output_dir={sys.argv[2]}/run"]) == 2
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor import checks
from mindspeed_rlxf.cluster.nodes import report_node
report_node([], None)
checks.check_host(checks.Subject(DeviceKind.NPU, "/x"))
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a host with four NPUs, whose libraries record their importers."""
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
        **hidden, "PATH": f"{smi.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}", "ASCEND_HOME_PATH": str(tmp_path / "cann"),
        "LD_LIBRARY_PATH": str(library.parent), "IMPORTED": str(tmp_path / "imported"),
        "RAY_ADDRESS": "local",
    }  # fmt: skip


@pytest.mark.long
def test_planning_checking_starting_and_the_doctor_import_neither(good, machine, tmp_path):
    command = [sys.executable, "-c", DRIVER, str(good), str(tmp_path)]
    done = subprocess.run(command, env=machine, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    driver = done.stdout.split("driver ")[1].split()[0]
    file = Path(machine["IMPORTED"])
    lines = file.read_text().splitlines() if file.exists() else []
    imported = [line.split() for line in lines if line[:1].isdigit()]
    assert "as far as the pools" in done.stderr
    assert not any(pid == driver for pid, _ in imported), "\n".join(lines)
    # the doctor asks torch, in a process of its own
    assert [name for pid, name in imported if pid != driver] == ["torch_npu"]


def test_a_driver_imports_no_megatron(forks: Forks) -> None:
    """Workers do, after MindSpeed has patched it, also with `runtime: local`."""
    modules = "mindspeed_rlxf.cli.train", "mindspeed_rlxf.trainer.run"
    with forks.start(send_imported, modules, megatron=False) as connection:
        assert receive(connection) == []


def send_imported(connection: Connection, modules: Sequence[str]) -> None:
    """Import modules in a new process; send the names of Megatron's that this brings in."""
    for module in modules:
        importlib.import_module(module)
    connection.send([name for name in sys.modules if name.startswith("megatron.")])
