"""Tables of the drivers' tools, and whether driver, torch and Ray agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import npu_versions
from mindspeed_rlxf.device.driver import DriverDevice, DriverView, parse_ascend, parse_nvidia
from mindspeed_rlxf.ops.doctor import devices, software

NVIDIA = """0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15
1, NVIDIA H100 80GB HBM3, 81559, 61000, 550.54.15
"""
# Two cards of one chip, then a card of two chips, whose devices are 2 and 3.
ASCEND = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2               | OK            | 94.3        45                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3302 / 65536         |
+===========================+===============+====================================================+
| 1     910B2               | Alarm         | 92.1        44                0    / 0             |
| 0                         | 0000:01:00.0  | 12          0    / 0          61000/ 65536         |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 170.1       36                0    / 0             |
| 0     2                   | 0000:9D:00.0  | 0           0    / 0          3100 / 65536         |
+------------------------------------------------------------------------------------------------+
| 1     Ascend910           | OK            | -           36                0    / 0             |
| 1     3                   | 0000:9F:00.0  | 0           0    / 0          2900 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 12345         | python                   | 57000                   |
+===========================+===============+====================================================+
"""


def test_the_tables_of_the_drivers_are_read() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert parse_nvidia(NVIDIA) == (
        "550.54.15",
        [DriverDevice(0, name, "OK", 81559, 4), DriverDevice(1, name, "OK", 81559, 61000)],
    )
    assert parse_ascend(ASCEND) == (
        "24.1.0",
        [
            DriverDevice(0, "910B2", "OK", 65536, 3302),
            DriverDevice(1, "910B2", "Alarm", 65536, 61000),
            DriverDevice(2, "Ascend910", "OK", 65536, 3100),
            DriverDevice(3, "Ascend910", "OK", 65536, 2900),
        ],
    )


@pytest.mark.parametrize("text", ["", "no table\n| 1 |\n", "0, x\n"])
def test_output_without_a_table_has_no_devices(text: str) -> None:
    assert parse_nvidia(text)[1] == parse_ascend(text)[1] == []


def test_a_sick_device_is_an_error_and_a_busy_one_a_warning() -> None:
    view = DriverView("npu-smi", *parse_ascend(ASCEND))
    found = {f.check: (f.status.value, f.value) for f in devices.driver_findings(view)}
    assert found["devices.driver"] == ("ok", "4 x 910B2, Ascend910, driver 24.1.0")
    assert found["devices.health"] == ("error", "1: Alarm")
    assert found["devices.memory"] == ("warning", "in use on 1: 61000 of 65536 MiB")


def test_torch_has_to_see_the_devices_of_the_driver_that_are_not_hidden() -> None:
    view = DriverView("nvidia-smi", *parse_nvidia(NVIDIA))

    def word(counted: int, hidden: str | None) -> str:
        return devices.count_finding(DeviceKind.CUDA, counted, view, hidden).status.value

    assert word(2, None) == word(1, "0") == "ok"
    assert word(1, None) == word(2, "0") == word(0, None) == "error"


def test_devices_that_ray_does_not_offer_are_reported_with_the_command() -> None:
    found = devices.ray_finding("NPU", 0, 8)
    assert found.status.value == "warning" and '"NPU": 8' in found.remedy
    assert devices.ray_finding("NPU", 8, 8).status.value == "ok"


def test_a_missing_tool_is_a_warning_of_its_own() -> None:
    found = devices.driver_findings(DriverView("npu-smi", "", (), "npu-smi is not on PATH"))
    assert [(f.status.value, f.value) for f in found] == [("warning", "npu-smi is not on PATH")]


def test_missing_packages_are_errors_and_others_out_of_range_warnings() -> None:
    from packaging.requirements import Requirement

    versions = {"torch": "2.1.0", "ray": None, "vllm": None, "numpy": "2.0"}
    ranges = {"torch": Requirement("torch>=2.5"), "ray": Requirement("ray>=2.40,<3")}
    found = list(software.package_findings(versions, ("torch", "ray"), ranges))
    assert [(f.check, f.status.value) for f in found] == [
        ("versions.torch", "warning"), ("versions.ray", "error"), ("versions.numpy", "ok"),
    ]  # fmt: skip
    assert "ray<3,>=2.40" in found[1].remedy


def test_the_version_of_cann_is_read_from_the_folder_of_set_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    file = folder / "ascend_toolkit_install.info"
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n", encoding="ascii")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert npu_versions.cann_version() == "8.5.0"
    file.unlink()
    text = "# version: 1.0\nruntime_running_version=[8.1.RC1]\n"
    (tmp_path / "version.cfg").write_text(text, encoding="ascii")
    assert npu_versions.cann_version() == "8.1.RC1"
