"""Versions of installed packages: a checkout on the path counts before an installed wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.config import packages
from tests.unit.device import npu_recorder


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Checkouts of Megatron-LM 0.12.1 and MindSpeed, over wheels of 0.16.1 and 0.12.1."""
    npu_recorder.install(monkeypatch, tmp_path)
    wheels = {packages.MEGATRON: "0.16.1", "mindspeed": "0.12.1"}
    monkeypatch.setattr(packages, "_installed", wheels.get)
    return tmp_path


@pytest.mark.usefixtures("sources")
def test_a_checkout_counts_before_the_wheel() -> None:
    assert packages.version(packages.MEGATRON) == "0.12.1"
    assert not [name for name in sys.modules if name.startswith("megatron.")]


@pytest.mark.parametrize("text", ["MAJOR = 0\n", "MAJOR = \n", None])
def test_where_a_checkout_does_not_say_the_metadata_does(sources: Path, text: str | None) -> None:
    file = sources / "Megatron-LM" / "megatron" / "core" / "package_info.py"
    file.unlink() if text is None else file.write_text(text)
    assert packages.version(packages.MEGATRON) == "0.16.1"
    assert packages.version("not-there") is None


def test_mindspeed_on_the_path_tells_its_version_in_its_setup(sources: Path) -> None:
    assert packages.version("mindspeed") == "0.12.1"  # of the wheel
    (sources / "MindSpeed" / "setup.py").write_text("__version__ = '0.16.0'\nraise SystemExit\n")
    assert packages.version("mindspeed") == "0.16.0"


def test_report_node_imports_neither_torch_nor_megatron_nor_ray() -> None:
    code = (
        "import sys\n"
        "from mindspeed_rlxf.cluster.nodes import report_node\n"
        "report_node([], None)\n"
        "print([n for n in ('torch', 'megatron.core', 'ray') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "[]"
