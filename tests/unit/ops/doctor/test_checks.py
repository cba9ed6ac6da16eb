"""Checks of one host, with the numbers given."""

import math

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device.control_group import Amount, read_amount
from mindspeed_rlxf.device.driver import DriverDevice, DriverView, parse_ascend, parse_nvidia
from mindspeed_rlxf.device.findings import Finding, Status, warning
from mindspeed_rlxf.ops.doctor import checks
from mindspeed_rlxf.ops.doctor.checks import Subject


def test_every_check_of_this_host_answers(tmp_path, monkeypatch):
    """Nothing is started and no network is needed; a check that fails says so beside the others."""

    def fails() -> list[Finding]:
        raise RuntimeError("two\nlines")

    subject = Subject(DeviceKind.CPU, str(tmp_path))
    found = checks.check_host(subject)
    assert {f.check.partition(".")[0] for f in found} == {
        "versions", "devices", "limits", "memory", "disk",
    }  # fmt: skip
    assert [f for f in found if "the check itself" in f.value] == []
    monkeypatch.setattr(checks, "check_limits", fails)
    others = [f for f in found if not f.check.startswith("limits.")]
    value = "the check itself failed (RuntimeError: two lines)"
    failed = checks.check_host(subject)
    assert warning("limits", value, "check it by hand") in failed
    assert [f.check for f in failed if f.check != "limits"] == [f.check for f in others]


@pytest.mark.parametrize(
    ("limits", "word"), [((32768, 32768), "ok"), ((-1, -1), "ok"), ((1024, 4096), "warning")]
)
def test_few_open_files_are_a_warning(limits, word, monkeypatch):
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: limits)
    found = next(f for f in checks.check_limits() if f.check == "limits.open_files")
    assert found.status.value == word


LIMITED = {
    2: {"memory.max": "9000", "pids.max": "500", "pids.current": "100"},
    1: {"memory/memory.limit_in_bytes": "9000", "pids/pids.max": "500", "pids/pids.current": "100"},
}
UNLIMITED = {
    2: {"memory.max": "max", "pids.max": "max"},
    1: {"pids/pids.max": "max", "memory/memory.limit_in_bytes": "9223372036854771712"},
}


@pytest.mark.parametrize("version", [2, 1])
def test_limits_of_the_container_count(tmp_path, version):
    def write(files: dict[str, str]) -> dict[str, Finding]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
        return {finding.check: finding for finding in checks.check_limits(tmp_path)}

    found = write(LIMITED[version])
    assert found["limits.processes"].value.startswith("400 processes")
    assert read_amount(Amount.MEMORY_LIMIT, tmp_path) == 9000
    found = write(UNLIMITED[version])
    assert not found["limits.processes"].value.startswith("400 ")
    assert read_amount(Amount.MEMORY_LIMIT, tmp_path) == math.inf


def test_little_room_is_reported_for_the_nearest_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "LITTLE_FREE", 2**60)
    found = next(iter(checks.check_disk(tmp_path / "new" / "run")))
    assert found.status is Status.WARNING and str(tmp_path) in found.value


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


def test_the_tables_of_the_drivers_are_read():
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
def test_output_without_a_table_has_no_devices(text):
    assert parse_nvidia(text)[1] == parse_ascend(text)[1] == []


def test_a_sick_device_is_an_error_and_a_busy_one_a_warning():
    view = DriverView("npu-smi", *parse_ascend(ASCEND))
    found = {f.check: (f.status.value, f.value) for f in checks.driver_findings(view)}
    assert found["devices.driver"] == ("ok", "4 x 910B2, Ascend910, driver 24.1.0")
    assert found["devices.health"] == ("error", "1: Alarm")
    assert found["devices.memory"] == ("warning", "in use on 1: 61000 of 65536 MiB")


def test_torch_has_to_see_the_devices_of_the_driver_that_are_not_hidden(monkeypatch):
    view = DriverView("nvidia-smi", *parse_nvidia(NVIDIA))
    monkeypatch.setattr(checks, "query_driver", lambda kind: view)

    def word(counted: int, visible: str | None) -> str:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(checks.device, "count_by_torch", lambda kind: counted)
        found = {f.check: f for f in checks.check_devices(DeviceKind.CUDA)}
        return found["devices.torch"].status.value

    assert word(2, None) == word(1, "0") == "ok"
    assert word(1, None) == word(2, "0") == word(0, None) == "error"


def test_missing_packages_are_errors_and_others_out_of_range_warnings(monkeypatch):
    versions = {"torch": "2.1.0", "numpy": "2.0"}
    monkeypatch.setattr(checks.packages, "version", versions.get)
    monkeypatch.setattr(checks, "requires", lambda name: ["torch>=2.5", "ray>=2.40,<3"])
    found = {f.check: f for f in checks.check_software(DeviceKind.CPU)}
    assert {f.check.partition(".")[2]: f.status.value for f in found.values()} == {
        "python": "ok", "torch": "warning", "ray": "error", "numpy": "ok",
    }  # fmt: skip
    assert "ray<3,>=2.40" in found["versions.ray"].remedy
